#!/usr/bin/env bash
# Qwen3-8B-Base on DAPO-Math-17k, FSDP.
: "${MODEL:=Qwen/Qwen3-8B-Base}"
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

train qwen3-8b \
  actor_rollout_ref.actor.strategy=fsdp2 \
  actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
  "$@"
