// One rollout: what it is, its conversation, its tokens, its life.

import { el } from "../dom.js";
import { address, ask } from "./ask.js";
import { lifeOf } from "./life.js";
import { count, folded, score } from "./text.js";
import { tokenRow } from "./tokens.js";

export async function showRollout(id, query) {
  const rollout = await ask("rollout", { id });
  const number = Number(query.get("sample") ?? 0);
  const token = query.has("token") ? Number(query.get("token")) : null;
  return el(
    "article",
    { class: "rollout" },
    el("h2", {}, `Rollout ${rollout.id}`),
    siblings(rollout),
    facts(rollout),
    el("section", {}, el("h3", {}, "Conversation"), conversation(rollout)),
    await tokensOf(rollout, number, token),
    lifeOf(rollout),
  );
}

function siblings(rollout) {
  const each = rollout.siblings.map((sibling) =>
    el(
      "a",
      { href: address(sibling.id), class: `sibling ${sibling.status}`, "aria-current": sibling.sibling === rollout.sibling ? "true" : null },
      `${sibling.sibling}: ${sibling.reward === null ? sibling.status : score(sibling.reward)}`,
    ),
  );
  return el("nav", { class: "siblings", "aria-label": "siblings" }, el("a", { href: address(rollout.group) }, "group side by side"), ...each);
}

function facts(rollout) {
  const parts = Object.entries(rollout.reward_parts).map(([name, value]) => `${name} ${score(value)}`);
  const above = rollout.reward !== null && rollout.group_mean !== null ? rollout.reward - rollout.group_mean : null;
  const rows = {
    fate: fateOf(rollout),
    status: rollout.status + (rollout.status === "truncated" ? ": a length limit cut it" : ""),
    failure: rollout.failure && `${rollout.failure.boundary}, ${rollout.failure.kind}: ${rollout.failure.message}`,
    reward: rollout.reward === null ? "none" : score(rollout.reward),
    "reward parts": parts.join(", "),
    "reward above its group's mean": above === null ? "" : score(above),
    advantage: rollout.advantage === null ? "" : score(rollout.advantage),
    age: rollout.age === null ? "" : `${rollout.age}: trained version ${rollout.version_at_take}, committed at version ${rollout.version_at_commit}`,
    environment: rollout.environment,
    task: `${rollout.task}, attempt ${rollout.attempt}`,
    worker: rollout.worker,
    metrics: Object.entries(rollout.metrics).map(([name, value]) => `${name} ${score(value)}`).join(", "),
  };
  const list = el("dl", { class: "facts" });
  for (const [name, value] of Object.entries(rows)) {
    if (value) list.append(el("dt", {}, name), el("dd", {}, String(value)));
  }
  return list;
}

export function fateOf({ fate, step }) {
  return step === null ? `dropped: ${fate}` : `trained in step ${step}`;
}

function conversation(rollout) {
  const place = el("div", { class: "conversation" }, ...rollout.messages.map((message) => said(rollout, message)));
  if (rollout.is_head) place.append(el("p", { class: "dim" }, "It was dropped: the heads of its texts are recorded, and no tokens."));
  if (rollout.num_messages > rollout.messages.length) place.append(further(rollout, place));
  return place;
}

function further(rollout, place) {
  let have = rollout.messages.length;
  const button = el("button", { type: "button", onclick: next }, label());
  function label() {
    return `show more: ${count(rollout.num_messages - have)} messages are folded`;
  }
  async function next() {
    const { messages } = await ask("messages", { id: rollout.id, start: have });
    button.before(...messages.map((message) => said(rollout, message)));
    have += messages.length;
    button.textContent = label();
    if (have >= rollout.num_messages || !messages.length) button.remove();
  }
  return button;
}

function said(rollout, message) {
  const roles = ["system", "user", "assistant", "tool"];
  const calls = message.tool_calls.map((call) =>
    el("div", { class: "tool-call" }, el("strong", {}, `calls ${call.name}`), call.id ? ` ${call.id}` : "", folded(call.arguments)),
  );
  return el(
    "div",
    { class: `message ${roles.includes(message.role) ? message.role : "other"}` },
    el("h4", {}, message.role, message.answers ? ` answers ${message.answers}` : ""),
    folded(message, { id: rollout.id, message: message.number }),
    ...calls,
  );
}

async function tokensOf(rollout, number, token) {
  const place = el("section", {}, el("h3", {}, "Tokens"));
  if (!rollout.samples.length) {
    place.append(el("p", { class: "dim" }, "No tokens are recorded."));
    return place;
  }
  if (rollout.samples.length > 1) {
    const rows = rollout.samples.map((sample, index) =>
      el("a", { href: address(rollout.id, { sample: index }), "aria-current": index === number ? "true" : null }, `row ${index}: ${count(sample.sampled)} of ${count(sample.tokens)} sampled`),
    );
    place.append(el("nav", { class: "siblings", "aria-label": "rows of tokens" }, ...rows));
  }
  place.append(await tokenRow(rollout, number, token));
  return place;
}
