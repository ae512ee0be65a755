// The siblings of a group: a table, and two of them side by side with what they have in common.

import { el } from "../dom.js";
import { address, ask } from "./ask.js";
import { fateOf } from "./rollout.js";
import { count, folded, score } from "./text.js";
import { compare } from "./token_diff.js";
import { tokenSpan } from "./tokens.js";

export async function showGroup(id, query) {
  const group = await ask("group", { id });
  const left = chosen(query.get("a"), group.best, group), right = chosen(query.get("b"), group.worst, group);
  const place = el(
    "article",
    { class: "group" },
    el("h2", {}, `Group ${group.group}`),
    el("p", {}, `${group.environment}, task ${group.task}, attempt ${group.attempt}: ${fateOf(group)}`),
    el("div", { class: "message user" }, el("h4", {}, "task"), folded(group.prompt)),
    group.answer.text ? el("div", { class: "message" }, el("h4", {}, "wanted answer"), folded(group.answer)) : null,
    table(group),
  );
  if (group.siblings.length > 1) place.append(await sideBySide(group, left, right));
  return place;
}

function chosen(given, otherwise, group) {
  const number = Number(given ?? otherwise ?? 0);
  return group.siblings[number] ?? group.siblings[0];
}

function table(group) {
  const parts = [...new Set(group.siblings.flatMap((sibling) => Object.keys(sibling.parts)))].sort();
  const head = ["rollout", "status", "reward", "advantage", ...parts, "sampled", "ends with"];
  const rows = group.siblings.map((sibling) =>
    el(
      "tr",
      { class: sibling.sibling === group.best ? "best" : sibling.sibling === group.worst ? "worst" : null },
      el("td", {}, el("a", { href: address(sibling.id) }, sibling.sibling), sibling.sibling === group.best ? " best" : sibling.sibling === group.worst ? " worst" : ""),
      el("td", {}, sibling.status),
      el("td", { class: "number" }, score(sibling.reward)),
      el("td", { class: "number" }, score(sibling.advantage)),
      ...parts.map((part) => el("td", { class: "number" }, score(sibling.parts[part]))),
      el("td", { class: "number" }, count(sibling.sampled)),
      el("td", { class: "wide end" }, sibling.ends.slice(-200)),
    ),
  );
  const names = el("thead", {}, el("tr", {}, ...head.map((name) => el("th", {}, name))));
  return el("div", { class: "table" }, el("table", { class: "rows" }, names, el("tbody", {}, ...rows)));
}

async function sideBySide(group, left, right) {
  const [before, after] = await Promise.all([left, right].map((sibling) => unitsOf(group, sibling)));
  const found = compare(before.keys, after.keys);
  const unit = group.is_head ? "characters" : "tokens";
  return el(
    "section",
    { class: "comparison" },
    el("h3", {}, "Side by side"),
    el("p", {}, choice(group, left, "a", right), " against ", choice(group, right, "b", left)),
    el("p", { class: "dim" }, `The first ${count(found.prefix)} ${unit} are the same (dim). Marked ones have no partner in the other rollout.`),
    el("div", { class: "columns" }, column(left, before, found.left, found.prefix), column(right, after, found.right, found.prefix)),
  );
}

function choice(group, sibling, name, other) {
  const options = group.siblings.map((each) => el("option", { value: each.sibling, selected: each === sibling }, `${each.sibling}: ${each.reward === null ? each.status : score(each.reward)}`));
  const change = (event) => {
    const query = { a: sibling.sibling, b: other.sibling, [name]: event.target.value };
    location.hash = address(group.group, name === "a" ? query : { a: other.sibling, b: event.target.value });
  };
  return el("label", {}, `rollout `, el("select", { onchange: change }, ...options));
}

function scored({ reward, status, advantage }) {
  if (reward === null) return status;
  return advantage === null ? `reward ${score(reward)}` : `reward ${score(reward)}, advantage ${score(advantage)}`;
}

// What is compared: tokens; characters of the last message where no tokens are recorded.
async function unitsOf(group, sibling) {
  if (sibling.samples) {
    const row = await ask("tokens", { id: sibling.id, sample: 0, start: 0 });
    return { keys: row.ids, rest: row.total - row.ids.length, show: (index) => tokenSpan(row, index) };
  }
  const characters = [...group.siblings[sibling.sibling].ends];
  return { keys: characters, rest: 0, show: (index) => el("span", { class: "token given" }, characters[index]) };
}

function column(sibling, units, differs, prefix) {
  const shown = units.keys.map((_, index) => {
    const span = units.show(index);
    if (index < prefix) span.classList.add("common");
    else if (differs[index]) span.classList.add("differs");
    return span;
  });
  return el(
    "div",
    { class: "column" },
    el("h4", {}, el("a", { href: address(sibling.id) }, `rollout ${sibling.sibling}`), `: ${scored(sibling)}`),
    el("div", { class: "token-row" }, ...shown),
    units.rest ? el("p", { class: "dim" }, `${count(units.rest)} further tokens are not compared`) : null,
  );
}
