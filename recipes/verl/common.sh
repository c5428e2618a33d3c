# What the recipes share; each sets MODEL and its own overrides, and calls `train`. See README.md for the variables.
# shellcheck shell=bash
set -euo pipefail

: "${MASK:=predictive}"                 # predictive | dppo-topk-kl | grpo-clip-higher | none
: "${NNODES:=1}" "${GPUS_PER_NODE:=8}"
: "${ROLLOUT:=vllm}"                    # vllm | sglang
: "${FP8:=0}"                           # 1: the rollout server quantises to FP8
: "${DATA:=$HOME/data}"                 # what make_data.py wrote; every node reads it
: "${TRAIN_FILES:=$DATA/dapo-math-17k.parquet}"
: "${VAL_FILES:=[$DATA/aime24.parquet,$DATA/aime25.parquet]}"
: "${OUTPUT:=$PWD/runs}"               # checkpoints; with several nodes, on a file system that they share
: "${TRACES:=}"                         # a directory for `predmask report`; a resumed run's go to from-NNNNNN in it
: "${DRY_RUN:=0}"                       # 1: print the command
: "${PYTHON:=python3}"

# Nothing but this differs between the masks. All record the top-K, for the same metrics at the same cost.
case $MASK in
  predictive)       mask=(--rule predictive --rule.divergence kl --rule.tail aggregated --rule.delta 0.15) ;;
  dppo-topk-kl)     mask=(--rule dppo --rule.divergence kl --rule.support topk --rule.delta 0.15) ;;
  grpo-clip-higher) mask=(--rule ppo_clip --rule.eps_low 0.2 --rule.eps_high 0.28) ;;
  none)             mask=(--rule none) ;;
  *) echo "MASK is '$MASK': choose predictive, dppo-topk-kl, grpo-clip-higher or none" >&2; exit 2 ;;
esac
mask+=(--top-k 20 --ratio-cap 5)
if [[ -n $TRACES ]]; then mask+=(--traces "$TRACES"); fi

# train NAME OVERRIDE...: what is given last wins.
train() {
  local name=$1-$MASK max_prompt=1024 max_response=8192 micro_batch_tokens=10240 words
  shift
  words=$("$PYTHON" -m predmask verl args "${mask[@]}")
  read -ra words <<<"$words"
  if [[ $FP8 == 1 ]]; then
    name+=-fp8
    words+=(actor_rollout_ref.rollout.quantization=fp8)
  fi
  local command=(
    "$PYTHON" -m verl.trainer.main_ppo
    # 64 questions of 8 responses a step, in 4 optimiser steps.
    "data.train_files=$TRAIN_FILES"
    "data.val_files=$VAL_FILES"
    data.train_batch_size=64
    data.max_prompt_length=$max_prompt
    data.max_response_length=$max_response
    data.filter_overlong_prompts=true
    actor_rollout_ref.rollout.n=8
    actor_rollout_ref.actor.ppo_mini_batch_size=16
    # Group-mean advantage, not divided by its standard deviation; no KL term, no entropy bonus.
    algorithm.adv_estimator=grpo
    algorithm.norm_adv_by_std_in_grpo=false
    algorithm.use_kl_in_reward=false
    actor_rollout_ref.actor.use_kl_loss=false
    actor_rollout_ref.actor.entropy_coeff=0
    # A constant divisor: without it, verl divides by the longest response of each micro-batch.
    actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum-norm
    actor_rollout_ref.actor.loss_scale_factor=$max_response
    actor_rollout_ref.actor.optim.lr=1e-6
    actor_rollout_ref.actor.optim.weight_decay=0.01
    'actor_rollout_ref.actor.optim.betas=[0.9,0.999]'
    actor_rollout_ref.actor.optim.clip_grad=1.0
    actor_rollout_ref.actor.use_dynamic_bsz=true
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$micro_batch_tokens
    "actor_rollout_ref.model.path=$MODEL"
    actor_rollout_ref.model.enable_gradient_checkpointing=true
    "actor_rollout_ref.rollout.name=$ROLLOUT"
    actor_rollout_ref.rollout.temperature=1.0
    actor_rollout_ref.rollout.max_model_len=$((max_prompt + max_response))
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6
    # avg@16 on AIME24 and AIME25.
    actor_rollout_ref.rollout.val_kwargs.n=16
    actor_rollout_ref.rollout.val_kwargs.do_sample=true
    actor_rollout_ref.rollout.val_kwargs.temperature=1.0
    trainer.test_freq=10
    trainer.total_training_steps=800
    trainer.total_epochs=1000
    trainer.save_freq=50
    "trainer.nnodes=$NNODES"
    "trainer.n_gpus_per_node=$GPUS_PER_NODE"
    trainer.project_name=predmask
    "trainer.experiment_name=$name"
    "trainer.default_local_dir=$OUTPUT/$name"
    'trainer.logger=[console,tensorboard]'
    "${words[@]}"
    "$@"
  )
  if [[ $DRY_RUN == 1 ]]; then
    printf '%q ' "${command[@]}"
    echo
  else
    exec "${command[@]}"
  fi
}
