"""All metrics, one per line: `name [unit]: description`. Prometheus help texts are made from this table.

`{...}` in a name stands for one word: an environment, a reason, an age.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

WORKER_METRICS = "worker-metrics"
"""Topic of the board on which workers post their counters; the learner sums them up over the fleet."""


class UnknownMetric(UserWarning):
    """A metric was logged whose name is not in the table."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    name: str
    unit: str
    help: str


_TABLE = """\
reward/mean: mean reward of the trained rollouts; dropped groups without signal do not count
reward/std: standard deviation of the rewards in the step batch
reward/{environment}/mean: mean reward of one environment's rollouts
reward/{environment}/{part}: mean of one named part of an environment's reward
episode/turns [turns]: mean generations per rollout
episode/length [tokens]: mean sampled tokens per rollout
episode/truncated [share]: rollouts cut by a length limit
episode/failed [share]: failed rollouts, which have no reward
guard/notches: how far the guard has tightened: how many times it has lowered the learning rate, or by how many versions max_age
policy/loss: total loss
policy/surrogate: the surrogate (advantage-weighted) part of the loss
policy/kl_reference: estimated KL divergence from the reference policy, if the objective has one
policy/entropy [nats]: mean entropy of the trained policy at sampled tokens, if measured
policy/tokens [tokens]: sampled tokens in the loss
policy/ratio_mean: mean probability ratio of trained to sampling policy
policy/ratio_std: standard deviation of the probability ratio
policy/ratio_min: smallest probability ratio
policy/ratio_max: largest probability ratio
policy/clip_frac [share]: sampled tokens whose ratio was clipped
policy/clip_low_frac [share]: sampled tokens whose ratio was clipped at a lower bound
policy/clip_high_frac [share]: sampled tokens whose ratio was clipped at an upper bound
policy/masked_frac [share]: sampled tokens excluded from the loss by a trust mask or the veto
policy/vetoed_frac [share]: sequences excluded from the loss by the veto
policy/corrected_frac [share]: sampled tokens whose importance weight was truncated or set to 0
policy/correction_mean: mean importance weight of the off-policy correction, before masks and the veto
policy/ess [share]: effective sample size of the token ratios, relative to the number of tokens
policy/ess_sequence [share]: effective sample size of the sequence ratios (products of token ratios), relative to their number
policy/chi2: mean squared token ratio minus 1
policy/chi2_sequence: mean squared sequence ratio minus 1
policy/kl_behave [nats]: estimated KL(sampling policy || trained policy), per token
policy/kl_current [nats]: estimated KL(trained policy || sampling policy), per token
policy/kl_proximal [nats]: estimated KL(proximal anchor policy || trained policy), per token
policy/perplexity_ratio: perplexity of sampled tokens under the trained policy divided by that under the sampling policy
policy/entropy_estimate [nats]: entropy of the trained policy, estimated from sampled tokens only
policy/logprob_mean [nats]: mean log-probability of sampled tokens under the trained policy
policy/logprob_abs_diff [nats]: mean |log-probability when trained - when sampled|
policy/logprob_abs_diff_max [nats]: maximum |log-probability when trained - when sampled|
policy/age_{age}/tokens [tokens]: sampled tokens of this age: 0, 1, 2_3, 4_7 or 8_up versions
policy/age_{age}/ratio_mean: mean probability ratio of tokens of this age
policy/age_{age}/ess [share]: effective sample size of the ratios of tokens of this age
policy/age_{age}/kl_behave [nats]: estimated KL(sampling || trained policy) at tokens of this age
policy/age_{age}/kl_current [nats]: estimated KL(trained || sampling policy) at tokens of this age
policy/age_{age}/logprob_abs_diff [nats]: mean |log-probability difference| at this age; age 0 compares engine and learner
policy/age_{age}/clip_frac [share]: tokens of this age whose ratio was clipped
policy/age_{age}/masked_frac [share]: tokens of this age excluded from the loss by a trust mask or the veto
policy/skipped_updates [updates]: updates of the step skipped for a non-finite loss or gradient
experts/imbalance_max: tokens of a layer's busiest expert divided by the mean of its experts, largest of all layers; 1: balanced
experts/imbalance_mean: the same, mean over layers
experts/idle [share]: experts that no token of the step chose, over all layers
experts/entropy [nats]: mean entropy of the routers' distributions over experts
experts/balancing_loss: balancing loss over the tokens of the step without its coefficient, mean over layers; 1: balanced
experts/z_loss: z-loss of the routers without its coefficient, mean over layers
value/loss: value loss
value/mean: mean predicted value
value/return_mean: mean return, the target of the critic
value/explained_variance: share of the variance of returns that the values explain
value/clip_frac [share]: tokens whose value change was clipped
value/grad_norm: gradient norm of a separate critic, before clipping
value/lr: learning rate of a separate critic
value/skipped_updates [updates]: critic updates of the step skipped for a non-finite loss or gradient
train/loss: training loss of `async-rl train`
train/nll [nats]: mean negative log-probability of trained tokens; with pairs, of chosen answers
train/perplexity: exp(train/nll)
train/tokens [tokens]: tokens trained on
train/pairs [pairs]: pairs trained on
train/accuracy [share]: pairs in which the chosen answer has the higher implicit reward (dpo) or score (rm)
train/margin: mean implicit reward (dpo) or score (rm) of chosen minus rejected answers
train/reward_chosen: mean implicit reward of chosen answers
train/reward_rejected: mean implicit reward of rejected answers
train/score_mean: mean score of all answers
train/epoch: passes over the dataset so far
train/dropped [examples]: examples of the step skipped as too long
data/{dataset} [examples]: examples of the step from one of several datasets
held_out/{measure}: the train/... measure on the held-out dataset
batch/advantage_abs: mean |advantage| in the step batch
batch/no_signal_frac [share]: samples with advantage 0
batch/sequences [samples]: samples in the step batch
batch/trained_tokens [tokens]: sampled tokens in the step batch
batch/tokens [tokens]: tokens in packed rows, including prompts
batch/bins [bins]: packed rows (micro-batches)
batch/oversize [bins]: samples longer than batch.bin_tokens, each in a row of its own
batch/too_long [samples]: samples longer than model.max_sequence, treated as batch.too_long says
batch/fill [share]: share of the packed rows' capacity in use
batch/imbalance: tokens of the largest data-parallel shard divided by the mean
batch/lock_step: cost of the most expensive row that ranks compute at the same time, divided by the mean
staleness/mean [versions]: mean age of the groups in the step batch
staleness/p95 [versions]: 95th percentile of the age
staleness/max [versions]: maximum age
staleness/in_flight [versions]: mean part of the age gained during the rollout
staleness/in_queue [versions]: mean part of the age gained while ready in the buffer
staleness/age_{age} [groups]: groups of the step batch with exactly this age
pace/target [steps]: steps' worth of groups that may be on their way (staleness.pace)
pace/slots [groups]: groups that may be on their way
pace/reserved [groups]: groups being rolled out when the step ended, from which the next pace is decided
pace/unreleased [groups]: groups trained by then whose slots had not returned
pace/held_back: 1 if the learner waited then although enough groups were ready: an unfinished one would have become too old
pace/pause_ahead: 1 in the steps before an evaluation, in which the pace is raised
staleness/dropped [groups]: groups dropped as too old, since the run began
buffer/depth [groups]: groups ready for their first use
buffer/again [groups]: groups ready for another use (replay)
buffer/reserved [groups]: tickets held by workers
buffer/slots_used [slots]: slots in use
buffer/bytes [bytes]: size of stored payloads
buffer/dropped/{reason} [groups]: tickets that ended untrained for this reason, since the run began
buffer/quarantined [groups]: payloads that failed validation, since the run began
buffer/kept [groups]: spent groups whose payloads are retained
buffer/lost_to_rollback [groups]: groups spent by a checkpoint that was lost; their tasks are rolled out again
buffer/expired [groups]: spent groups deleted before they were archived or discarded
buffer/owed [uses]: samples_per_insert x inserts - uses
tokens/generated [tokens]: tokens of ended rollouts, prompts included, since the run began = trained + dropped + in flight
tokens/trained [tokens]: those that trained in a step which a checkpoint contains
tokens/dropped/{reason} [tokens]: those of groups that ended untrained for this reason
tokens/in_flight [tokens]: those of groups that are ready, or trained in a step that no checkpoint contains yet
rollout/inflight [groups]: groups being rolled out by all workers
rollout/tok_s [tokens/s]: tokens sampled per second by all workers, over the last 10 s
rollout/reward: mean reward of all episodes that ended since the previous row, including groups that are not trained
rollout/episodes [rollouts]: finished episodes, since the workers started
rollout/forked [samples]: samples started because a prompt did not extend an earlier one, since the workers started
rollout/failures/{boundary} [rollouts]: failed episodes at this boundary, since the workers started
rollout/refills [rollouts]: failed episodes played again for their group, since the workers started
rollout/rests [times]: times a circuit breaker paused an environment, since the workers started
rollout/left_behind [times]: tasks and processes leaked by episodes and ended for them
rollout/left_behind/{what} [times]: the same by kind: tasks, processes, stubborn (tasks that do not end when cancelled)
rollout/lease_lost [groups]: groups given up by workers because their ticket was lost
rollout/workers [workers]: workers that are present
engine/running [generations]: generations in the running batch
engine/waiting [generations]: generations waiting for room in an engine
engine/kv_used [share]: share of the KV cache in use
engine/prefix_tokens_reused [tokens]: prompt tokens not computed because a cached prefix covered them
engine/preemptions [times]: generations that lost their place in the KV cache and are resumed later
environment/{environment}/share [share]: share of the step batch from this environment
environment/{environment}/groups [groups]: committed groups of this environment, since the workers started
environment/{environment}/failed [rollouts]: failed episodes of this environment, since the workers started
environment/{environment}/reward: mean reward of its episodes, since the workers started
environment/{environment}/unavailable [tickets]: tickets returned by workers that cannot play it
gateway/sessions [episodes]: episodes with an open endpoint
gateway/generations [generations]: generations in progress for agents
gateway/requests [requests]: requests of agents, since the worker started
gateway/refused [requests]: requests answered with an error
gateway/tokens [tokens]: tokens sampled for agents
gateway/forks [prompts]: prompts of ended episodes that did not extend an earlier one
eval/step [steps]: optimizer steps of the evaluated weights
eval/version: version of the evaluated weights
eval/{environment}/{measure}: measures of an evaluation: mean@K, pass@K, greedy, _low and _high (docs/evaluation.md)
weights/version: version produced by the step
weights/live: the live version
weights/pushes [times]: versions that went live, since the learner started
weights/coalesced [versions]: packed versions replaced by a newer one before their push began, since the learner started
weights/pinned: 1 while an operator's pin or rollback holds back newer versions
weights/wait_s [s]: from packing of the live version to the start of its push
weights/push_s [s]: from the start of a push until all workers staged it
weights/bytes [bytes]: size of the last push, per worker
weights/workers [workers]: workers that received the last push
weights/dropped [workers]: workers left out of the last push because of a failure or timeout
checkpoint/write_s [s]: from the copies of the last checkpoint until it was durable, concurrent with training
checkpoint/stall_s [s]: time that the last checkpoint blocked training
checkpoint/bytes [bytes]: size of the last checkpoint, all ranks
checkpoint/failed [times]: checkpoints that could not be written, since the learner started
metrics/dropped [rows]: rows of metrics.jsonl that could not be written, since the learner started
recording/dropped [rows]: events and rollout groups that could not be recorded, since the learner started
recording/spans_dropped [spans]: spans that recording.otlp_endpoint did not take in time, since the learner started
samples/dropped [rows]: rows of samples.jsonl that could not be written, since the learner started
memory/host [bytes]: resident memory of the learner's rank 0
memory/gpu [bytes]: the most that tensors of rank 0 took on its GPU since the previous step's row
time/step [s]: training of the step, including the hand-over of its weights to the publisher
time/pack [s]: packing the step batch, concurrent with the previous step
time/wait_data [s]: waiting for groups
idle/learner [share]: share of the step's time spent waiting for groups
idle/no_groups [share]: of the time since the previous step's row, the learner waited for a batch
idle/pushing [share]: of the time since the previous step's row, training waited for weights to be packed or to become live
idle/checkpoint [share]: of the time since the previous step's row, training waited for a checkpoint
idle/other [share]: of the time since the previous step's row, the learner neither trained nor waited for any of these
perf/tok_s [tokens/s]: sampled tokens trained per second
optim/lr: learning rate
optim/grad_norm: gradient norm before clipping
optim/skipped: 1 if the step was skipped for a non-finite loss or gradient
progress/tokens [tokens]: sampled tokens trained, since the run began
progress/samples [rollouts]: rollouts trained, since the run began
progress/wall_s [s]: training time, since the run began
"""

METRICS: tuple[Metric, ...] = tuple(
    Metric(name=name, unit=unit, help=help) for name, unit, help in re.findall(r"^(\S+?)(?: \[(.+?)\])?: (.+)$", _TABLE, re.M)
)

_EXACT = {metric.name: metric for metric in METRICS}
_FAMILIES = [
    (re.compile(re.sub(r"\\{.*?\\}", r"[^/]+", re.escape(metric.name))), metric) for metric in METRICS if "{" in metric.name
]


@cache
def find_metric(name: str) -> Metric | None:
    """Find the table's entry for a logged name; None if there is none."""
    if name in _EXACT:
        return _EXACT[name]
    return next((metric for pattern, metric in _FAMILIES if pattern.fullmatch(name)), None)
