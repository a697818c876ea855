"""float64 to the end: transformers' norms, softmax and RoPE round to float32 whatever the model's
dtype, which hides float64 equality behind 1e-7. Inside `Float64` a float64 tensor stays one:

    with Float64(model), torch.no_grad():
        logits = model(input_ids).logits
"""

import torch
from torch.overrides import TorchFunctionMode


class Float64(TorchFunctionMode):
    """Casts of float64 tensors to float32 do nothing, and a mixture's experts run one by one: the
    grouped matrix product has no float64."""

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        model.config._experts_implementation = "eager"

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if args and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float64:
            if func is torch.Tensor.float:
                return args[0]
            args = tuple(map(keep, args))
            kwargs = {name: keep(value) for name, value in kwargs.items()}
        return func(*args, **kwargs)


def keep(value):
    return torch.float64 if value is torch.float32 else value
