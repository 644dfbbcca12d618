"""The device that `--device` names."""

from __future__ import annotations

from ktconv.errors import UsageError


def device_of(name: str) -> str:
    """The device that `--device` means. UsageError for one that PyTorch does not see here."""
    import torch

    name = name.lower()
    found = torch.accelerator.current_accelerator(check_available=True)
    there = ["cpu"]
    if found is not None:
        there += [
            found.type,
            *(f"{found.type}:{n}" for n in range(torch.accelerator.device_count())),
        ]
    if name == "auto":
        return there[1] if found else "cpu"
    if name not in there:
        raise UsageError(
            f"--device {name} cannot be used: PyTorch sees {', '.join(there)} here",
            "use one of these, or install a PyTorch build for your GPU",
        )
    return name
