"""All metrics: name, unit and description. Prometheus help texts and the documentation are made from this table.

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

    @property
    def is_family(self) -> bool:
        return "{" in self.name


def _metric(name: str, unit: str, help: str) -> Metric:
    return Metric(name=name, unit=unit, help=help)


METRICS: tuple[Metric, ...] = (
    _metric("reward/mean", "", "mean reward of the trained rollouts; dropped groups without signal do not count"),
    _metric("reward/std", "", "standard deviation of the rewards in the step batch"),
    _metric("reward/{environment}/mean", "", "mean reward of one environment's rollouts"),
    _metric("reward/{environment}/{part}", "", "mean of one named part of an environment's reward"),
    _metric("episode/turns", "turns", "mean generations per rollout"),
    _metric("episode/length", "tokens", "mean sampled tokens per rollout"),
    _metric("episode/truncated", "share", "rollouts cut by a length limit"),
    _metric("episode/failed", "share", "failed rollouts, which have no reward"),
    _metric("guard/notches", "", "actions of the guard in force: how many times it has lowered the learning rate or max_age"),
    _metric("policy/loss", "", "total loss"),
    _metric("policy/surrogate", "", "the surrogate (advantage-weighted) part of the loss"),
    _metric("policy/kl_reference", "", "estimated KL divergence from the reference policy, if the objective has one"),
    _metric("policy/entropy", "nats", "mean entropy of the trained policy at sampled tokens, if measured"),
    _metric("policy/tokens", "tokens", "sampled tokens in the loss"),
    _metric("policy/ratio_mean", "", "mean probability ratio of trained to sampling policy"),
    _metric("policy/ratio_std", "", "standard deviation of the probability ratio"),
    _metric("policy/ratio_min", "", "smallest probability ratio"),
    _metric("policy/ratio_max", "", "largest probability ratio"),
    _metric("policy/clip_frac", "share", "sampled tokens whose ratio was clipped"),
    _metric("policy/clip_low_frac", "share", "sampled tokens whose ratio was clipped at a lower bound"),
    _metric("policy/clip_high_frac", "share", "sampled tokens whose ratio was clipped at an upper bound"),
    _metric("policy/masked_frac", "share", "sampled tokens excluded from the loss by a trust mask or the veto"),
    _metric("policy/vetoed_frac", "share", "sequences excluded from the loss by the veto"),
    _metric("policy/corrected_frac", "share", "sampled tokens whose importance weight was truncated or set to 0"),
    _metric("policy/correction_mean", "", "mean importance weight of the off-policy correction, before masks and the veto"),
    _metric("policy/ess", "share", "effective sample size of the token ratios, relative to the number of tokens"),
    _metric(
        "policy/ess_sequence",
        "share",
        "effective sample size of the sequence ratios (products of token ratios), relative to their number",
    ),
    _metric("policy/chi2", "", "mean squared token ratio minus 1"),
    _metric("policy/chi2_sequence", "", "mean squared sequence ratio minus 1"),
    _metric("policy/kl_behave", "nats", "estimated KL(sampling policy || trained policy), per token"),
    _metric("policy/kl_current", "nats", "estimated KL(trained policy || sampling policy), per token"),
    _metric("policy/kl_proximal", "nats", "estimated KL(proximal anchor policy || trained policy), per token"),
    _metric(
        "policy/perplexity_ratio",
        "",
        "perplexity of sampled tokens under the trained policy divided by that under the sampling policy",
    ),
    _metric("policy/entropy_estimate", "nats", "entropy of the trained policy, estimated from sampled tokens only"),
    _metric("policy/logprob_mean", "nats", "mean log-probability of sampled tokens under the trained policy"),
    _metric("policy/logprob_abs_diff", "nats", "mean |log-probability when trained - when sampled|"),
    _metric("policy/logprob_abs_diff_max", "nats", "maximum |log-probability when trained - when sampled|"),
    _metric("policy/age_{age}/tokens", "tokens", "sampled tokens of this age: 0, 1, 2_3, 4_7 or 8_up versions"),
    _metric("policy/age_{age}/ratio_mean", "", "mean probability ratio of tokens of this age"),
    _metric("policy/age_{age}/ess", "share", "effective sample size of the ratios of tokens of this age"),
    _metric("policy/age_{age}/kl_behave", "nats", "estimated KL(sampling || trained policy) at tokens of this age"),
    _metric("policy/age_{age}/kl_current", "nats", "estimated KL(trained || sampling policy) at tokens of this age"),
    _metric(
        "policy/age_{age}/logprob_abs_diff",
        "nats",
        "mean |log-probability difference| at tokens of this age; age 0 compares engine and learner",
    ),
    _metric("policy/age_{age}/clip_frac", "share", "tokens of this age whose ratio was clipped"),
    _metric("policy/age_{age}/masked_frac", "share", "tokens of this age excluded from the loss by a trust mask or the veto"),
    _metric("policy/skipped_updates", "updates", "updates of the step skipped for a non-finite loss or gradient"),
    _metric("value/loss", "", "value loss"),
    _metric("value/mean", "", "mean predicted value"),
    _metric("value/return_mean", "", "mean return, the target of the critic"),
    _metric("value/explained_variance", "", "share of the variance of returns that the values explain"),
    _metric("value/clip_frac", "share", "tokens whose value change was clipped"),
    _metric("value/grad_norm", "", "gradient norm of a separate critic, before clipping"),
    _metric("value/lr", "", "learning rate of a separate critic"),
    _metric("value/skipped_updates", "updates", "critic updates of the step skipped for a non-finite loss or gradient"),
    _metric("train/loss", "", "training loss of `async-rl train`"),
    _metric("train/nll", "nats", "mean negative log-probability of trained tokens; with pairs, of chosen answers"),
    _metric("train/perplexity", "", "exp(train/nll)"),
    _metric("train/tokens", "tokens", "tokens trained on"),
    _metric("train/pairs", "pairs", "pairs trained on"),
    _metric("train/accuracy", "share", "pairs in which the chosen answer has the higher implicit reward (dpo) or score (rm)"),
    _metric("train/margin", "", "mean implicit reward (dpo) or score (rm) of chosen minus rejected answers"),
    _metric("train/reward_chosen", "", "mean implicit reward of chosen answers"),
    _metric("train/reward_rejected", "", "mean implicit reward of rejected answers"),
    _metric("train/score_mean", "", "mean score of all answers"),
    _metric("train/epoch", "", "passes over the dataset so far"),
    _metric("train/dropped", "examples", "examples of the step skipped as too long"),
    _metric("held_out/{measure}", "", "the train/... measure on the held-out dataset"),
    _metric("batch/advantage_abs", "", "mean |advantage| in the step batch"),
    _metric("batch/no_signal_frac", "share", "samples with advantage 0"),
    _metric("batch/sequences", "samples", "samples in the step batch"),
    _metric("batch/trained_tokens", "tokens", "sampled tokens in the step batch"),
    _metric("batch/tokens", "tokens", "tokens in packed rows, including prompts"),
    _metric("batch/bins", "bins", "packed rows (micro-batches)"),
    _metric("batch/oversize", "bins", "samples longer than batch.bin_tokens, each in a row of its own"),
    _metric("batch/too_long", "samples", "samples dropped because they exceed the model's context"),
    _metric("batch/fill", "share", "share of the packed rows' capacity in use"),
    _metric("batch/imbalance", "", "tokens of the largest data-parallel shard divided by the mean"),
    _metric("batch/lock_step", "", "cost of the most expensive row that ranks compute at the same time, divided by the mean"),
    _metric("staleness/mean", "versions", "mean age of the groups in the step batch"),
    _metric("staleness/p95", "versions", "95th percentile of the age"),
    _metric("staleness/max", "versions", "maximum age"),
    _metric("staleness/in_flight", "versions", "mean part of the age gained during the rollout"),
    _metric("staleness/in_queue", "versions", "mean part of the age gained while ready in the buffer"),
    _metric("staleness/age_{age}", "groups", "groups of the step batch with exactly this age"),
    _metric("staleness/dropped", "groups", "groups dropped as too old, since the run began"),
    _metric("buffer/depth", "groups", "groups ready for their first use"),
    _metric("buffer/again", "groups", "groups ready for another use (replay)"),
    _metric("buffer/reserved", "groups", "tickets held by workers"),
    _metric("buffer/slots_used", "slots", "slots in use"),
    _metric("buffer/bytes", "bytes", "size of stored payloads"),
    _metric("buffer/dropped/{reason}", "groups", "tickets that ended untrained for this reason, since the run began"),
    _metric("buffer/quarantined", "groups", "payloads that failed validation, since the run began"),
    _metric("buffer/kept", "groups", "spent groups whose payloads are retained"),
    _metric(
        "buffer/lost_to_rollback", "groups", "groups spent by a checkpoint that was lost; their tasks are rolled out again"
    ),
    _metric("buffer/expired", "groups", "spent groups deleted before they were archived or discarded"),
    _metric("buffer/owed", "uses", "samples_per_insert x inserts - uses"),
    _metric("rollout/inflight", "groups", "groups being rolled out by all workers"),
    _metric("rollout/tok_s", "tokens/s", "tokens sampled per second by all workers"),
    _metric(
        "rollout/reward",
        "",
        "mean reward of all episodes that ended since the previous row, including groups that are not trained",
    ),
    _metric("rollout/episodes", "rollouts", "finished episodes, since the workers started"),
    _metric(
        "rollout/forked", "samples", "samples started because a prompt did not extend an earlier one, since the workers started"
    ),
    _metric("rollout/failures/{boundary}", "rollouts", "failed episodes at this boundary, since the workers started"),
    _metric("rollout/refills", "rollouts", "failed episodes played again for their group, since the workers started"),
    _metric("rollout/rests", "times", "times a circuit breaker paused an environment, since the workers started"),
    _metric("rollout/left_behind", "times", "tasks and processes leaked by episodes and ended for them"),
    _metric(
        "rollout/left_behind/{what}",
        "times",
        "the same by kind: tasks, processes, stubborn (tasks that do not end when cancelled)",
    ),
    _metric("rollout/lease_lost", "groups", "groups given up by workers because their ticket was lost"),
    _metric("rollout/workers", "workers", "workers that are present"),
    _metric("engine/running", "generations", "generations in the running batch"),
    _metric("engine/waiting", "generations", "generations waiting for room in an engine"),
    _metric("engine/kv_used", "share", "share of the KV cache in use"),
    _metric("engine/prefix_tokens_reused", "tokens", "prompt tokens not computed because a cached prefix covered them"),
    _metric("engine/preemptions", "times", "generations that lost their place in the KV cache and are resumed later"),
    _metric("environment/{environment}/share", "share", "share of the step batch from this environment"),
    _metric("environment/{environment}/groups", "groups", "committed groups of this environment, since the workers started"),
    _metric("environment/{environment}/failed", "rollouts", "failed episodes of this environment, since the workers started"),
    _metric("environment/{environment}/reward", "", "mean reward of its episodes, since the workers started"),
    _metric("environment/{environment}/unavailable", "tickets", "tickets returned by workers that cannot play it"),
    _metric("gateway/sessions", "episodes", "episodes with an open endpoint"),
    _metric("gateway/generations", "generations", "generations in progress for agents"),
    _metric("gateway/requests", "requests", "requests of agents, since the worker started"),
    _metric("gateway/refused", "requests", "requests answered with an error"),
    _metric("gateway/tokens", "tokens", "tokens sampled for agents"),
    _metric("gateway/forks", "prompts", "prompts of ended episodes that did not extend an earlier one"),
    _metric("eval/step", "steps", "optimizer steps of the evaluated weights"),
    _metric("eval/version", "", "version of the evaluated weights"),
    _metric(
        "eval/{environment}/{measure}",
        "",
        "measures of an evaluation: mean@K, pass@K, greedy, _low and _high (docs/evaluation.md)",
    ),
    _metric("weights/version", "", "version produced by the step"),
    _metric("weights/live", "", "the live version"),
    _metric("weights/pushes", "times", "versions that went live, since the learner started"),
    _metric(
        "weights/coalesced",
        "versions",
        "packed versions replaced by a newer one before their push began, since the learner started",
    ),
    _metric("weights/pinned", "", "1 while an operator's pin or rollback holds back newer versions"),
    _metric("weights/wait_s", "s", "from packing of the live version to the start of its push"),
    _metric("weights/push_s", "s", "from the start of a push until all workers staged it"),
    _metric("weights/bytes", "bytes", "size of the last push, per worker"),
    _metric("weights/workers", "workers", "workers that received the last push"),
    _metric("weights/dropped", "workers", "workers left out of the last push because of a failure or timeout"),
    _metric("checkpoint/write_s", "s", "from the copies of the last checkpoint until it was durable, concurrent with training"),
    _metric("checkpoint/stall_s", "s", "time that the last checkpoint blocked training"),
    _metric("checkpoint/bytes", "bytes", "size of the last checkpoint, all ranks"),
    _metric("checkpoint/failed", "times", "checkpoints that could not be written, since the learner started"),
    _metric("metrics/dropped", "rows", "rows of metrics.jsonl that could not be written, since the learner started"),
    _metric("samples/dropped", "rows", "rows of samples.jsonl that could not be written, since the learner started"),
    _metric("time/step", "s", "training of the step, including the hand-over of its weights to the publisher"),
    _metric("time/pack", "s", "packing the step batch, concurrent with the previous step"),
    _metric("time/wait_data", "s", "waiting for groups"),
    _metric("idle/learner", "share", "share of the step's time spent waiting for groups"),
    _metric("perf/tok_s", "tokens/s", "sampled tokens trained per second"),
    _metric("optim/lr", "", "learning rate"),
    _metric("optim/grad_norm", "", "gradient norm before clipping"),
    _metric("optim/skipped", "", "1 if the step was skipped for a non-finite loss or gradient"),
    _metric("progress/tokens", "tokens", "sampled tokens trained, since the run began"),
    _metric("progress/samples", "rollouts", "rollouts trained, since the run began"),
    _metric("progress/wall_s", "s", "training time, since the run began"),
)

_EXACT = {metric.name: metric for metric in METRICS if not metric.is_family}
_FAMILIES = [
    (re.compile(re.sub(r"\\{.*?\\}", r"[^/]+", re.escape(metric.name))), metric) for metric in METRICS if metric.is_family
]


@cache
def find_metric(name: str) -> Metric | None:
    """Find the table's entry for a logged name; None if there is none."""
    if name in _EXACT:
        return _EXACT[name]
    return next((metric for pattern, metric in _FAMILIES if pattern.fullmatch(name)), None)
