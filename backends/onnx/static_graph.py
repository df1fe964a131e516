"""The graphs for NPUs: every shape fixed, attention of plain products, only new keys and values come out."""

from __future__ import annotations

import onnx

from edgert.backends.onnx.graph import Builder, rope_index, ropes, windows
from edgert.quantize.architecture import Layer

HIDDEN = -30_000.0  # added to scores of hidden positions; fits float16, and its exponential is zero


class Static(Builder):
    """n tokens of one sequence behind a cache with room for n_past.

    Inputs: x (1, n, n_embd); cos.i and sin.i (n, head_dim), as `rope_rows` makes them; mask.j (groups * n,
    n_past + n) for each window; k.i (n_head_kv, head_dim, n_past) and v.i (n_head_kv, n_past, head_dim).
    Outputs: logits (1, 1, n_vocab) if n is 1, else hidden (1, n, n_embd), for which `Head` computes logits;
    new_k.i (n_head_kv, head_dim, n) and new_v.i (n_head_kv, n, head_dim).
    """

    batch = (1,)

    def build(self, n: int, n_past: int) -> onnx.ModelProto:
        a = self.a
        self.n, self.n_past = n, n_past
        groups = a.n_head // a.n_head_kv
        x = self.input("x", [1, n, a.n_embd])
        self._ropes, self._windows = ropes(a), windows(a)
        for i in range(len(self._ropes)):
            self.input(f"cos.{i}", [n, a.head_dim])
            self.input(f"sin.{i}", [n, a.head_dim])
        for j in range(len(self._windows)):
            self.input(f"mask.{j}", [groups * n, n_past + n])
        for i, layer in enumerate(a.layers):
            h = self._attention(i, layer, self.norm(x, f"blk.{i}.attn_norm.weight"))
            if a.post_norm:
                h = self.norm(h, f"blk.{i}.post_attention_norm.weight")
            x = self.node("Add", [x, h])
            h = self.feed_forward(i, self.norm(x, f"blk.{i}.ffn_norm.weight"), n)
            if a.post_norm:
                h = self.norm(h, f"blk.{i}.post_ffw_norm.weight")
            x = self.node("Add", [x, h])
        x = self.norm(x, "output_norm.weight")
        if n == 1:
            self.output(self.head(x, 1), "logits", [1, 1, a.n_vocab])
        else:
            self.output(x, "hidden", [1, n, a.n_embd])
        return self.model(f"static_{n}_{n_past}")

    def _attention(self, i: int, layer: Layer, h: str) -> str:
        a, n = self.a, self.n
        n_kv, groups, d = a.n_head_kv, a.n_head // a.n_head_kv, a.head_dim
        group = f"blk.{i}.qkv"
        products = self.matmul(h, group, n, f"blk.{i}.qkv.bias" if a.qkv_bias else "")
        widths = [a.n_head * d, n_kv * d, n_kv * d]
        matrices = self.weights.groups[group] if not a.qkv_bias else []
        q, k, v = self.split(products, widths, matrices)
        q = self._heads(q, a.n_head, f"blk.{i}.attn_q_norm.weight" if a.qk_norm else "")
        k = self._heads(k, n_kv, f"blk.{i}.attn_k_norm.weight" if a.qk_norm else "")
        v = self._heads(v, n_kv, "")
        rope = rope_index(self._ropes, layer.rope)
        q = self.node("Mul", [self._rotate(q, rope), self.scalar(float(a.attention_scale))])
        q = self.node("Reshape", [q, self.ints(n_kv, groups * n, d)])
        k = self.node("Transpose", [self._rotate(k, rope)], perm=[0, 2, 1])
        self.output(k, f"new_k.{i}", [n_kv, d, n])
        self.output(v, f"new_v.{i}", [n_kv, n, d])
        past_k = self.input(f"k.{i}", [n_kv, d, self.n_past])
        past_v = self.input(f"v.{i}", [n_kv, self.n_past, d])
        scores = self.concat([self.node("MatMul", [q, past_k]), self.node("MatMul", [q, k])])
        scores = self.softcap(scores, a.attn_logit_softcapping)
        scores = self.node("Add", [scores, f"mask.{self._windows.index(layer.window)}"])
        shares = self.node("Softmax", [scores], axis=-1)
        old, new = self.node("Split", [shares, self.ints(self.n_past, n)], 2, axis=-1)
        y = self.node("Add", [self.node("MatMul", [old, past_v]), self.node("MatMul", [new, v])])
        if n > 1:
            y = self.node("Reshape", [y, self.ints(a.n_head, n, d)])
            y = self.node("Transpose", [y], perm=[1, 0, 2])
        y = self.node("Reshape", [y, self.ints(1, n, a.n_head * d)])
        return self.concat(self.matmul(y, f"blk.{i}.attn_output", n))

    def _heads(self, x: str, n_heads: int, norm: str) -> str:
        """(n, n_heads * head_dim) -> (n_heads, n, head_dim), each head normalized if a weight is named."""
        if self.n == 1:
            x = self.node("Reshape", [x, self.ints(n_heads, 1, self.a.head_dim)])
            return self.norm(x, norm) if norm else x
        x = self.node("Reshape", [x, self.ints(self.n, n_heads, self.a.head_dim)])
        x = self.norm(x, norm) if norm else x
        return self.node("Transpose", [x], perm=[1, 0, 2])

    def _rotate(self, x: str, rope: int | None) -> str:
        half = self.a.head_dim // 2
        first, second = self.node("Split", [x, self.ints(half, half)], 2, axis=-1)
        turned = self.node("Mul", [self.concat([second, first]), f"sin.{rope}"])
        return self.node("Add", [self.node("Mul", [x, f"cos.{rope}"]), turned])


class Head(Builder):
    """hidden (1, 1, n_embd) -> logits (1, 1, n_vocab), for the rows of a chunk that someone wants."""

    batch = (1,)
    small = True

    def build(self) -> onnx.ModelProto:
        hidden = self.input("hidden", [1, 1, self.a.n_embd])
        self.output(self.head(hidden, 1), "logits", [1, 1, self.a.n_vocab])
        return self.model("head")
