"""verl's platform "cpu": verl imports this in each process (VERL_USE_EXTERNAL_MODULES)."""

from contextlib import contextmanager
from types import ModuleType

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry
from verl.utils.distributed import initialize_global_process_group_ray

# Its own default names gloo twice, for the host and for the device, which torch refuses.
initialize_global_process_group_ray.__defaults__ = (None, "gloo")


class _Device(ModuleType):
    """`torch.cpu` with what verl calls on `torch.cuda`: there is no device memory to speak of."""

    def __init__(self):
        super().__init__("cpu")

    def __getattr__(self, name):
        return getattr(torch.cpu, name)

    def get_device_name(self):
        return "CPU"

    def set_device(self, index):
        pass

    def empty_cache(self):
        pass

    def memory_allocated(self):
        return 0

    max_memory_allocated = max_memory_reserved = memory_reserved = memory_allocated

    def mem_get_info(self):
        return 0, 0


@PlatformRegistry.register(platform="cpu")
class CPUPlatform(PlatformBase):
    """Devices are Ray's logical GPUs: two of them may well be one processor."""

    device_name = "cpu"
    vendor_name = "any"
    device_module = _Device()

    def is_available(self):
        return False

    def current_device(self):
        return "cpu"  # not an index: verl moves tensors to it

    def device_count(self):
        return 1

    def set_device(self, device_index):
        pass

    def synchronize(self, device_index=None):
        pass

    def manual_seed(self, seed):
        pass

    def manual_seed_all(self, seed):
        pass

    def set_allocator_settings(self, settings):
        pass

    def empty_cache(self):
        pass

    def get_device_capability(self, device_index=0):
        return None, None

    def communication_backend_name(self):
        return "gloo"

    def visible_devices_envvar(self):
        return "CUDA_VISIBLE_DEVICES"  # the one that Ray sets for logical GPUs

    def ray_resource_name(self):
        return "GPU"

    def ray_noset_envvars(self):
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self):
        return False

    @contextmanager
    def nvtx_range(self, msg):
        yield

    def profiler_start(self):
        pass

    def profiler_stop(self):
        pass

    def cudart(self):
        return None
