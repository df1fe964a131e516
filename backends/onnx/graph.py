"""The ONNX graphs of a model, lowered from its Architecture; needs onnx and numpy, no torch.

`fused` is for the CPU provider: any number of tokens, attention in one operator that updates the cache in place.
`static` is for NPUs: fixed shapes, attention of plain products, only the new keys and values come out. It takes
embedding rows, so that the table stays in the GGUF file. Both take weights of one file of external data.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper

from edgert.backends.onnx.style import Style
from edgert.backends.onnx.weights import DATA, Matrix, Weights
from edgert.quantize.architecture import Architecture, Layer, Rope

MICROSOFT = "com.microsoft"
Dim = int | str


def ropes(a: Architecture) -> list[Rope]:
    """The different ropes of the layers; graph inputs cos.i and sin.i belong to the i-th."""
    found: list[Rope] = []
    for layer in a.layers:
        if rope_index(found, layer.rope) is None:
            found.append(layer.rope)
    return found


def rope_index(found: Sequence[Rope], rope: Rope) -> int | None:
    """Where the rope stands in the list; frequencies decide, since a rope may hold an array."""
    frequencies = rope.frequencies()
    for i, other in enumerate(found):
        if np.array_equal(other.frequencies(), frequencies):
            return i
    return None


def windows(a: Architecture) -> list[int]:
    """The different windows of the layers, 0 for none; the graph input mask.i belongs to the i-th."""
    return sorted({layer.window for layer in a.layers})


def rope_table(rope: Rope, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines, float32 (n, n_dims / 2) each."""
    angles = positions.astype(np.float64)[:, None] * rope.frequencies()
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def rope_rows(rope: Rope, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What `static` graphs take, float32 (n, n_dims) each: x * cos + (x with its halves swapped) * sin."""
    cos, sin = rope_table(rope, positions)
    return np.concatenate([cos, cos], axis=1), np.concatenate([-sin, sin], axis=1)


class Builder:
    """Collects the nodes, initializers and ends of a graph, and knows the parts that both profiles share."""

    batch: tuple[int, ...] = ()  # QNN takes MatMulNBits of three dimensions only: (1,)
    small = False  # whether the graph may bring its weights along

    def __init__(self, a: Architecture, weights: Weights, style: Style) -> None:
        self.a, self.weights, self.style = a, weights, style
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: dict[str, TensorProto] = {}
        self.inputs: list[onnx.ValueInfoProto] = []
        self.outputs: list[onnx.ValueInfoProto] = []
        self.products: dict[str, int] = {}  # multiplications by weights for one token, by node
        self._counter = 0

    # The alphabet.

    def node(self, op: str, inputs: Sequence[str], n_outputs: int = 1, domain: str = "", **attributes: Any) -> Any:
        """Adds a node; returns the name of its output, or a list of them."""
        self._counter += 1
        outputs = [f"{op}_{self._counter}.{i}" for i in range(n_outputs)]
        name = f"{op}_{self._counter}"
        self.nodes.append(helper.make_node(op, list(inputs), outputs, name=name, domain=domain, **attributes))
        return outputs[0] if n_outputs == 1 else outputs

    def input(self, name: str, shape: Sequence[Dim], dtype: int = TensorProto.FLOAT) -> str:
        self.inputs.append(helper.make_tensor_value_info(name, dtype, list(shape)))
        return name

    def output(self, value: str, name: str, shape: Sequence[Dim]) -> None:
        self.nodes.append(helper.make_node("Identity", [value], [name], name=f"out.{name}"))
        self.outputs.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, list(shape)))

    def ints(self, *values: int) -> str:
        name = "ints." + ".".join(map(str, values))
        if name not in self.initializers:
            self.initializers[name] = helper.make_tensor(name, TensorProto.INT64, [len(values)], values)
        return name

    def scalar(self, value: float) -> str:
        name = f"scalar.{value!r}"
        if name not in self.initializers:
            self.initializers[name] = helper.make_tensor(name, TensorProto.FLOAT, [], [value])
        return name

    def weight(self, name: str, shape: Sequence[int] = (), alias: str = "") -> str:
        """A tensor of the weights file; under another name it can have another shape as well."""
        alias = alias or name
        if alias not in self.initializers:
            entry = self.weights.entries[name]
            tensor = TensorProto()
            tensor.name = alias
            tensor.data_type = helper.np_dtype_to_tensor_dtype(np.dtype(entry.dtype))
            tensor.dims.extend(shape or entry.shape)
            if self.small and not self.style.outside:
                tensor.raw_data = self.weights.values(name)
            else:
                tensor.data_location = TensorProto.EXTERNAL
                for key, value in (("location", DATA), ("offset", entry.offset), ("length", entry.n_bytes)):
                    tensor.external_data.add(key=key, value=str(value))
            self.initializers[alias] = tensor
        return alias

    def model(self, name: str) -> onnx.ModelProto:
        """The graph with all that was added."""
        graph = helper.make_graph(
            self.nodes, name, self.inputs, self.outputs, initializer=list(self.initializers.values())
        )
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid(MICROSOFT, 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=10, producer_name="edgert")
        helper.set_model_props(model, {"edgert.products": json.dumps(self.products)})
        return model

    # Words: x is float32 (tokens, width), or (1, tokens, width) where the profile has a `batch` dimension.

    def norm(self, x: str, weight: str) -> str:
        if self.style.fused_norm:
            eps = float(self.a.norm_eps)
            return self.node("SimplifiedLayerNormalization", [x, self.weight(weight)], axis=-1, epsilon=eps)
        squares = self.node("Mul", [x, x])
        mean = self.node("ReduceMean", [squares, self.ints(-1)], keepdims=1)
        root = self.node("Sqrt", [self.node("Add", [mean, self.scalar(float(self.a.norm_eps))])])
        return self.node("Mul", [self.node("Div", [x, root]), self.weight(weight)])

    def matmul(self, x: str, group: str, n_tokens: Dim, bias: str = "") -> list[str]:
        """x times the transpose of each matrix of the group; the sums of blocks are shared."""
        sums: dict[int, str] = {}
        outputs = []
        for m in self.weights.groups[group]:
            if not m.bits:
                y = self.node("MatMul", [x, self.weight(f"{m.name}.floats")])
            else:
                y = self.node(
                    "MatMulNBits",
                    [x, self.weight(f"{m.name}.codes"), self.weight(f"{m.name}.scales")],
                    domain=MICROSOFT,
                    K=m.n_cols,
                    N=m.n_rows,
                    bits=m.bits,
                    block_size=m.block_size,
                    **({"accuracy_level": self.style.accuracy_level} if self.style.accuracy_level else {}),
                )
            self.products[self.nodes[-1].name] = m.n_rows * m.n_cols
            if m.has_rest:
                if m.block_size not in sums:
                    sums[m.block_size] = self._block_sums(x, m, n_tokens)
                y = self._add_product(y, sums[m.block_size], self.weight(f"{m.name}.rest"))
            outputs.append(y)
        if bias:
            outputs = [self.node("Add", [self.concat(outputs), self.weight(bias)])]
        return outputs

    def _block_sums(self, x: str, m: Matrix, n_tokens: Dim) -> str:
        rows = n_tokens if isinstance(n_tokens, int) else -1
        blocks = self.node("Reshape", [x, self.ints(*self.batch, rows, m.n_cols // m.block_size, m.block_size)])
        return self.node("ReduceSum", [blocks, self.ints(len(self.batch) + 2)], keepdims=0)

    def _add_product(self, y: str, sums: str, rest: str) -> str:
        """y + sums times rest."""
        if self.batch:
            return self.node("Add", [y, self.node("MatMul", [sums, rest])])
        return self.node("Gemm", [sums, rest, y])

    def concat(self, parts: list[str]) -> str:
        return parts[0] if len(parts) == 1 else self.node("Concat", parts, axis=-1)

    def split(self, parts: list[str], widths: Sequence[int], matrices: Sequence[Matrix]) -> list[str]:
        """The products of a group, as parts of these widths."""
        if [m.n_rows for m in matrices] == list(widths) and len(parts) == len(widths):
            return parts
        return self.node("Split", [self.concat(parts), self.ints(*widths)], len(widths), axis=-1)

    def feed_forward(self, i: int, h: str, n_tokens: Dim) -> str:
        a, group = self.a, f"blk.{i}.gate_up"
        products = self.matmul(h, group, n_tokens)
        gate, up = self.split(products, [a.n_ff, a.n_ff], self.weights.groups[group])
        h = self.node("Mul", [self.activation(gate), up])
        return self.concat(self.matmul(h, f"blk.{i}.ffn_down", n_tokens))

    def activation(self, x: str) -> str:
        if self.a.activation == "gelu":
            return self.node("Gelu", [x], approximate="tanh")
        return self.node("Mul", [x, self.node("Sigmoid", [x])])

    def softcap(self, x: str, cap: float) -> str:
        if not cap:
            return x
        tanh = self.node("Tanh", [self.node("Div", [x, self.scalar(cap)])])
        return self.node("Mul", [tanh, self.scalar(cap)])

    def head(self, x: str, n_tokens: Dim) -> str:
        """Normalized rows to logits."""
        logits = self.concat(self.matmul(x, "output", n_tokens))
        return self.softcap(logits, self.a.final_logit_softcapping)


class Fused(Builder):
    """GroupQueryAttention with a cache of any length; residual sums and norms in one node."""

    def build(self) -> onnx.ModelProto:
        """Inputs: tokens int64 (n), or x (n, n_embd) where the head is no table of embeddings; wanted int64 (w), total
        int32 (), lengths int32 (1) = total - 1, cos.i and sin.i (positions, n_dims / 2), k.i and v.i (1, n_head_kv,
        positions, head_dim). Outputs: logits (w, n_vocab), new_k.i and new_v.i, which may be bound to the inputs'
        memory."""
        a = self.a
        x = self._embeddings()
        wanted = self.input("wanted", ["w"], TensorProto.INT64)
        self.input("total", [], TensorProto.INT32)
        self.input("lengths", [1], TensorProto.INT32)
        self._ropes = ropes(a)
        for i, rope in enumerate(self._ropes):
            self.input(f"cos.{i}", ["positions", rope.n_dims // 2])
            self.input(f"sin.{i}", ["positions", rope.n_dims // 2])
        h = self.norm(x, "blk.0.attn_norm.weight")
        for i, layer in enumerate(a.layers):
            y = self._attention(i, layer, h)
            if a.post_norm:
                y = self.norm(y, f"blk.{i}.post_attention_norm.weight")
            h, x = self._skip_norm(y, x, f"blk.{i}.ffn_norm.weight")
            y = self.feed_forward(i, h, "n")
            if a.post_norm:
                y = self.norm(y, f"blk.{i}.post_ffw_norm.weight")
            if i + 1 == a.n_layer:  # only rows whose logits are wanted go on
                x, y = (self.node("Gather", [value, wanted], axis=0) for value in (x, y))
            following = f"blk.{i + 1}.attn_norm.weight" if i + 1 < a.n_layer else "output_norm.weight"
            h, x = self._skip_norm(y, x, following)
        self.output(self.head(h, "w"), "logits", ["w", a.n_vocab])
        return self.model("fused")

    def _embeddings(self) -> str:
        """Looked up here where that is possible: between two steps, with cold caches, numpy takes long for it."""
        a, table = self.a, self.weights.table(self.a)
        if table is None:
            return self.input("x", ["n", a.n_embd])
        tokens = self.input("tokens", ["n"], TensorProto.INT64)
        # Names of their own: what MatMulNBits lays out anew is not kept as it was.
        codes = self.weight(f"{table.name}.codes", (table.n_rows, table.n_cols * table.bits // 8), "embeddings.codes")
        scales = self.weight(f"{table.name}.scales", alias="embeddings.scales")
        sizes = {"bits": table.bits, "block_size": table.block_size, "gather_axis": 0, "quantize_axis": 1}
        x = self.node("GatherBlockQuantized", [codes, tokens, scales], domain=MICROSOFT, **sizes)
        return x if a.embedding_scale == 1 else self.node("Mul", [x, self.scalar(float(np.float32(a.embedding_scale)))])

    def _skip_norm(self, y: str, x: str, weight: str) -> tuple[str, str]:
        """The norm of x + y, and the sum."""
        inputs = [y, x, self.weight(weight)]
        normed, _, _, total = self.node(
            "SkipSimplifiedLayerNormalization", inputs, 4, MICROSOFT, epsilon=float(self.a.norm_eps)
        )
        self.nodes[-1].output[1:3] = ["", ""]
        return normed, total

    def _attention(self, i: int, layer: Layer, h: str) -> str:
        a, group = self.a, f"blk.{i}.qkv"
        width_q, width_kv = a.n_head * a.head_dim, a.n_head_kv * a.head_dim
        products = self.matmul(h, group, "n", f"blk.{i}.qkv.bias" if a.qkv_bias else "")
        if a.qk_norm:
            matrices = self.weights.groups[group] if not a.qkv_bias else []
            q, k, v = self.split(products, [width_q, width_kv, width_kv], matrices)
            q, k = (
                self.node("Reshape", [self._head_norm(value, width, weight), self.ints(1, -1, width)])
                for value, width, weight in (
                    (q, width_q, f"blk.{i}.attn_q_norm.weight"),
                    (k, width_kv, f"blk.{i}.attn_k_norm.weight"),
                )
            )
            parts = [q, k, self.node("Reshape", [v, self.ints(1, -1, width_kv)])]
        else:
            packed = self.concat(products)
            parts = [self.node("Reshape", [packed, self.ints(1, -1, width_q + 2 * width_kv)]), "", ""]
        cache: list[Dim] = ["positions", a.head_dim]
        past = [self.input(f"{part}.{i}", [1, a.n_head_kv, *cache]) for part in "kv"]
        rope = rope_index(self._ropes, layer.rope)
        y, _, _ = self.node(
            "GroupQueryAttention",
            [*parts, *past, "lengths", "total", f"cos.{rope}", f"sin.{rope}"],
            3,
            MICROSOFT,
            num_heads=a.n_head,
            kv_num_heads=a.n_head_kv,
            scale=float(a.attention_scale),
            local_window_size=layer.window or -1,
            do_rotary=1,
            softcap=float(a.attn_logit_softcapping),
        )
        self.nodes[-1].output[1:] = [f"new_k.{i}", f"new_v.{i}"]
        for part in "kv":
            info = helper.make_tensor_value_info(f"new_{part}.{i}", TensorProto.FLOAT, [1, a.n_head_kv, *cache])
            self.outputs.append(info)
        y = self.node("Reshape", [y, self.ints(-1, width_q)])
        return self.concat(self.matmul(y, f"blk.{i}.attn_output", "n"))

    def _head_norm(self, x: str, width: int, weight: str) -> str:
        heads = self.node("Reshape", [x, self.ints(-1, width // self.a.head_dim, self.a.head_dim)])
        return self.norm(heads, weight)


class Observed(Fused):
    """Gives out what each group of matrices reads, besides: outputs seen.GROUP (n, n_cols), the head's (w, n_embd)."""

    def matmul(self, x: str, group: str, n_tokens: Dim, bias: str = "") -> list[str]:
        self.output(x, f"seen.{group}", [n_tokens, self.weights.groups[group][0].n_cols])
        return super().matmul(x, group, n_tokens, bias)
