// The life of a rollout as lanes over time, from the ticket to the checkpoint; what is not recorded is said.

import { el } from "../dom.js";
import { count, seconds } from "./text.js";

const LANES = {
  "rolled out": "ticket: from its reservation until its group was scored",
  task: "task: posed by the environment",
  queue: "engine queue: waits for its first token",
  inference: "generation",
  environment: "environment and tools",
  reward: "grading",
  blocked: "blocked: code stopped its worker, and all that ran in it",
  "in queue": "committed: ready in the buffer",
  taken: "taken: waits for its step",
  trained: "step: trained",
  "until checkpoint": "until the checkpoint that contains it",
};
export const SHORT = { task: "task", queue: "engine queue", inference: "generation", environment: "environment and tools", reward: "grading", blocked: "blocked worker" };
const MOST_BARS = 400;

export function lifeOf(rollout) {
  const place = el("section", { class: "life" }, el("h3", {}, "Life"));
  if (rollout.life.length) place.append(lanes(rollout));
  if (rollout.checkpoint_step !== null) place.append(el("p", { class: "dim" }, `The checkpoint of step ${rollout.checkpoint_step} contains it.`));
  if (rollout.missing.length) place.append(el("p", { class: "dim" }, "Not recorded: ", rollout.missing.join("; "), "."));
  return place;
}

function lanes(rollout) {
  const from = Math.min(...rollout.life.map((span) => span.start));
  const until = Math.max(...rollout.life.map((span) => span.stop), from + 1e-3);
  const table = el("table", { class: "lanes" });
  for (const what of new Set([...Object.keys(LANES), ...rollout.life.map((span) => span.what)])) {
    const spans = rollout.life.filter((span) => span.what === what);
    if (spans.length) table.append(lane(what, spans, from, until));
  }
  return el("div", {}, el("div", { class: "table" }, table), el("p", { class: "dim" }, `${seconds(until - from)} in all`));
}

function lane(what, spans, from, until) {
  const blocked = spans.reduce((sum, span) => sum + span.blocked_s, 0);
  const total = spans.reduce((sum, span) => sum + span.stop - span.start, 0) - blocked;
  const track = el("div", { class: "track" });
  for (const span of spans.slice(0, MOST_BARS)) {
    const bar = el("span", { class: `piece ${what === "blocked" ? what : ""}`, title: told(span, from) });
    bar.style.setProperty("left", `${(100 * (span.start - from)) / (until - from)}%`);
    bar.style.setProperty("width", `${(100 * (span.stop - span.start)) / (until - from)}%`);
    track.append(bar);
  }
  const times = spans.length > 1 ? ` in ${count(spans.length)} parts` : "";
  const drawn = spans.length > MOST_BARS ? ` (the first ${MOST_BARS} are drawn)` : "";
  const without = blocked > 0 ? `, and ${seconds(blocked)} blocked` : "";
  return el("tr", {}, el("th", { scope: "row" }, LANES[what] ?? what), el("td", {}, seconds(total), times, without, drawn), el("td", { class: "wide" }, track));
}

function told(span, from) {
  const when = `${seconds(span.start - from)} to ${seconds(span.stop - from)}: ${seconds(span.stop - span.start)}${span.detail ? `, at least; ${span.detail}` : ""}`;
  if (span.oldest_version < 0) return when;
  const { oldest_version: oldest, newest_version: newest } = span;
  return `${when}, version ${oldest === newest ? oldest : `${oldest} to ${newest}`}`;
}
