#!/usr/bin/env bash
# Qwen3-30B-A3B-Base on DAPO-Math-17k, Megatron with tensor and expert parallelism.
: "${MODEL:=Qwen/Qwen3-30B-A3B-Base}"
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

# Weights and optimiser states move to the CPU while the server samples.
train qwen3-30b-a3b \
  model_engine=megatron \
  actor_rollout_ref.actor.megatron.tensor_model_parallel_size=4 \
  actor_rollout_ref.actor.megatron.expert_model_parallel_size=8 \
  actor_rollout_ref.actor.megatron.expert_tensor_parallel_size=1 \
  actor_rollout_ref.actor.megatron.param_offload=true \
  actor_rollout_ref.actor.megatron.optimizer_offload=true \
  actor_rollout_ref.rollout.tensor_model_parallel_size=4 \
  "$@"
