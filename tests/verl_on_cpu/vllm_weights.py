"""How vLLM's build for CPUs takes new weights: it has laid its own out anew, so that verl cannot write into them."""

from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension


class Extension(vLLMColocateWorkerExtension):
    """verl's extension of vLLM's worker, with vLLM's own reloading."""

    def update_weights_from_ipc(self, peft_config=None, base_sync_done=False, use_shm=False):
        weights = []
        receiver = BucketedWeightReceiver(self._get_zmq_handle(), self.device, use_shm=use_shm)
        receiver.receive_weights(lambda bucket, is_last: weights.extend((name, part.clone()) for name, part in bucket))
        self.model_runner.reload_weights(weights_iterator=iter(weights))
