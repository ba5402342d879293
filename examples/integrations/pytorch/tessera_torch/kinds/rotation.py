"""Rows that are rotated before they are stored, so that no few channels are much larger than the others."""
import torch

ROTATIONS = ("none", "hadamard")


def check(method, rotate):
    """Errors: ValueError for a rotation that is not there, or under which a method would go by what no longer is."""
    if rotate not in ROTATIONS:
        raise ValueError(f"rotate is '{rotate}'; expected {' or '.join(ROTATIONS)}; leave rotate out to store channels as the model gives them")
    refusing = {"expected_attention": "turns queries by the model's RoPE", "criticalkv": "weighs values by their channels",
                **dict.fromkeys(("mosaickv", "think"), "chooses among channels itself")}
    if rotate != "none" and not isinstance(method, str):
        raise ValueError(f"rotate is '{rotate}'; expected 'none' beside a Policy, which may go by the model's own channels; leave rotate out")
    why = refusing.get(method)
    if rotate != "none" and why:
        raise ValueError(f"rotate is '{rotate}'; expected 'none' under {method}, which {why}; leave rotate out")


def hadamard(dim, device):
    """Walsh and Hadamard's matrix [dim, dim], its own inverse; of a dim that is no power of two in blocks of the largest that divides it."""
    block = dim & -dim
    made = torch.ones(1, 1, device=device)
    while made.shape[0] < block:
        made = torch.cat([torch.cat([made, made], 1), torch.cat([made, -made], 1)])
    return torch.block_diag(*[made * block ** -0.5] * (dim // block))


def rotated(x, by):
    """Rows [.., dim] by a matrix, in fp32."""
    return (x.float() @ by).to(x.dtype)
