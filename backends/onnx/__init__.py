"""ONNX Runtime behind the waist, for processors that only its execution providers reach (NPUs)."""
