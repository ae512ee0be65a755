// The list of rollouts: filters, a page of rows, and what the list lacks.

import { el } from "../dom.js";
import { address, ask } from "./ask.js";
import { fateOf } from "./rollout.js";
import { count, score, seconds } from "./text.js";

const STATUS = ["ok", "truncated", "masked", "failed"];
const ORDERS = ["newest", "oldest", "best", "worst", "longest", "shortest", "freshest", "stalest", "slowest", "quickest"];
const BOUNDS = { reward: "any", age: "1", step: "1", sampled: "1" };

// Returns the place to show, and the list itself.
export async function showList(query) {
  const wanted = Object.fromEntries(query);
  const found = await ask("rollouts", wanted);
  const place = el("section", {}, el("h2", {}, "Rollouts"), filters(wanted, found), summary(found), el("div", { class: "table" }, table(found.rows)), pages(wanted, found));
  return { place, list: { ...found, query: wanted } };
}

// Replaces the rows, not the filters, which may be in use; the focused row keeps the focus. Returns the list, or null if it is gone.
export async function renewList(place, query) {
  const wanted = Object.fromEntries(query);
  const found = await ask("rollouts", wanted);
  const rows = place.querySelector("table.list");
  if (!rows) return null;
  const focused = rows.contains(document.activeElement) ? document.activeElement.getAttribute("href") : null;
  place.querySelector(".summary").replaceWith(summary(found));
  place.querySelector(".pages").replaceWith(pages(wanted, found));
  const renewed = table(found.rows);
  rows.replaceWith(renewed);
  if (focused) [...renewed.querySelectorAll("a")].find((link) => link.getAttribute("href") === focused)?.focus();
  return { ...found, query: wanted };
}

function filters(wanted, found) {
  const form = el("form", { class: "filters", onsubmit: apply, onchange: apply });
  const fates = Object.entries(found.fates).sort((a, b) => b[1] - a[1]);
  form.append(
    choice("environment", found.environments.map((name) => [name, name])),
    choice("fate", [["dropped", "dropped, for any reason"], ...fates.map(([fate, groups]) => [fate, `${fate} (${count(groups)} groups)`])]),
    choice("status", STATUS.map((name) => [name, name])),
    ...Object.keys(BOUNDS).map(bounds),
    el("label", {}, "text ", el("input", { name: "text", type: "search", value: wanted.text, maxlength: 200 })),
    choice("order", ORDERS.map((name) => [name, name]), "newest"),
    el("a", { href: address("") }, "clear"),
  );
  return form;

  function choice(name, options, otherwise = "") {
    const all = otherwise ? [] : [el("option", { value: "" }, "any")];
    const given = options.map(([value, label]) => el("option", { value, selected: value === (wanted[name] ?? otherwise) }, label));
    return el("label", {}, `${name} `, el("select", { name }, ...all, ...given));
  }
  function bounds(name) {
    const bound = (which) =>
      el("input", { name: `${which}_${name}`, type: "number", step: BOUNDS[name], value: wanted[`${which}_${name}`], "aria-label": `${which} ${name}` });
    return el("label", {}, `${name} `, bound("min"), "–", bound("max"));
  }
  function apply(event) {
    event.preventDefault();
    const given = Object.fromEntries(new FormData(form));
    if (given.order === "newest") delete given.order;
    location.hash = address("", given);
  }
}

function summary(found) {
  const { let_go: gone } = found;
  const parts = [`${count(found.total)} of ${count(found.recorded)} recorded rollouts`];
  if (!found.is_complete) parts.push(`the search ended after ${count(found.searched)} groups: narrow it by other filters to look further`);
  if (gone.deleted.rollouts) parts.push(`${count(gone.deleted.rollouts)} older rollouts were deleted because of the size limit, the last of them recorded at ${new Date(1000 * gone.deleted_until).toLocaleString()}`);
  for (const [why, number] of Object.entries(gone.lost)) if (number) parts.push(`${count(number)} groups were not recorded (${why})`);
  return el("p", { class: "summary", role: "status" }, `${parts.join("; ")}.`);
}

function table(rows) {
  const head = ["rollout", "environment", "task", "status", "reward", "advantage", "fate", "age", "sampled", "turns", "took", "worker"];
  const body = rows.map((row) =>
    el(
      "tr",
      { class: row.status },
      el("td", {}, el("a", { href: address(row.id) }, row.id)),
      el("td", {}, row.environment),
      el("td", { class: "end" }, row.task),
      el("td", {}, row.status),
      el("td", { class: "number" }, score(row.reward)),
      el("td", { class: "number" }, score(row.advantage)),
      el("td", {}, fateOf(row)),
      el("td", { class: "number" }, row.age ?? "–"),
      el("td", { class: "number" }, count(row.sampled)),
      el("td", { class: "number" }, count(row.turns)),
      el("td", { class: "number" }, row.seconds === null ? "–" : seconds(row.seconds)),
      el("td", { class: "end" }, row.worker),
    ),
  );
  const heading = (name) => el("th", { title: name === "took" ? "from the task to the score; the orders slowest and quickest sort by it" : null }, name);
  return el("table", { class: "rows list" }, el("thead", {}, el("tr", {}, ...head.map(heading))), el("tbody", {}, ...body));
}

function pages(wanted, found) {
  const size = Number(wanted.limit ?? 50);
  const to = (label, offset, isPossible) => (isPossible ? el("a", { href: address("", { ...wanted, offset: offset || "" }) }, label) : el("span", { class: "dim" }, label));
  const last = Math.max(0, Math.floor((found.total - 1) / size) * size);
  const shown = found.rows.length ? `${count(found.offset + 1)} to ${count(found.offset + found.rows.length)} of ${count(found.total)}` : "none";
  return el(
    "div",
    { class: "pages", role: "navigation", "aria-label": "pages of the list" },
    to("first", 0, found.offset > 0),
    to("previous", Math.max(0, found.offset - size), found.offset > 0),
    shown,
    to("next", found.offset + size, found.offset + size < found.total),
    to("last", last, found.offset + size < found.total),
  );
}
