#!/usr/bin/env bash
# Qwen3-4B-Base on DAPO-Math-17k, FSDP.
: "${MODEL:=Qwen/Qwen3-4B-Base}"
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

train qwen3-4b \
  actor_rollout_ref.actor.strategy=fsdp2 \
  actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
  "$@"
