"""The devices of a model's layers: where they are several, each has a cache of the library for its layers."""
import torch


def layer_devices(model):
    """Of each layer the device on which its attention computes, for TesseraCache(devices=...): of a model with a `device_map`, or one
    whose layers were moved by hand."""
    devices = [model.device] * model.config.get_text_config(decoder=True).num_hidden_layers
    for module in model.get_decoder().modules():
        layer = getattr(module, "layer_idx", None)
        if isinstance(layer, int) and 0 <= layer < len(devices) and next(module.parameters(), None) is not None:
            devices[layer] = _device_of(module)
    return devices


def _device_of(module):
    """Where a module computes: accelerate may keep its weights elsewhere and fetch them for each call."""
    given = (getattr(getattr(part, "_hf_hook", None), "execution_device", None) for part in module.modules())
    fetched = next((device for device in given if device is not None), None)
    return next(module.parameters()).device if fetched is None else _named(fetched)


def checked(devices, layers):
    """A device for each layer, or None. Errors: ValueError for what is no list of them."""
    if devices is None:
        return None
    if not isinstance(devices, (list, tuple)) or len(devices) != layers:
        given = f"{len(devices)}" if isinstance(devices, (list, tuple)) else f"of the type {type(devices).__name__}"
        raise ValueError(f"devices are {given}; expected a list with one for each layer of the model, which are {layers}; pass "
                         "layer_devices(model), or leave devices out where all layers are on one")
    return [_named(device) for device in devices]


def _named(device):
    """With its number, as tensors say it."""
    device = torch.device(device)
    return torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" and device.index is None else device
