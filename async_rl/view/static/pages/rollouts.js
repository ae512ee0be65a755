// Rollouts: a filtered list and the ledger of fates (#/rollouts), a group (#/rollouts/GROUP), a rollout (#/rollouts/GROUP/SIBLING),
// one of its tokens (?token=17).

import { el, fill } from "../dom.js";
import { address, ask } from "../rollouts/ask.js";
import { showGroup } from "../rollouts/group.js";
import { showLedger } from "../rollouts/ledger.js";
import { renewList, showList } from "../rollouts/list.js";
import { showRollout } from "../rollouts/rollout.js";
import { showStages } from "../rollouts/stages.js";

let list = { query: {}, rows: [], offset: 0, total: 0 }; // what was listed last: next and previous follow it

export function open({ rest, query, go }) {
  const place = el("div", { class: "rollouts" }, el("p", { class: "dim" }, "reading …"));
  const element = el("div", {}, el("link", { rel: "stylesheet", href: "/static/rollouts.css" }), place);
  show(place, rest, query);
  let shown; // the step that the list has
  let next = 0; // a list that takes long is asked for less often
  const update = ({ state }) => {
    if (rest[0] || shown === state.step || Date.now() < next) return;
    const begun = Date.now(), isFirst = shown === undefined; // then `show` has just asked for it
    shown = state.step;
    if (!isFirst) refresh(place, query).finally(() => { next = Date.now() + 10 * (Date.now() - begun); });
  };
  const keys = {
    j: ["next rollout", () => neighbour(place, rest, go, 1)],
    k: ["previous rollout", () => neighbour(place, rest, go, -1)],
    "]": ["next sibling", () => sibling(place, go, 1)],
    "[": ["previous sibling", () => sibling(place, go, -1)],
    g: ["group side by side", () => rest.length === 2 && go(address(rest[0]))],
    l: ["list of rollouts", () => go(address("", list.query))],
    "/": ["search for a text", () => place.querySelector("input[name=text]")?.focus()],
  };
  return { element, keys, update };
}

/** List what was recorded meanwhile. A reader who is on a later page, or searches for a text, is left alone. */
async function refresh(place, query) {
  if (query.get("offset") || query.get("text")) return;
  try {
    const [found, stages, ledger] = await Promise.all([renewList(place, query), showStages(), showLedger()]);
    if (found) list = found;
    place.querySelector(".stages")?.replaceWith(stages);
    place.querySelector(".ledger")?.replaceWith(ledger);
  } catch {
    // The frame of the page says that the server does not answer.
  }
}

async function show(place, rest, query) {
  try {
    const parts = await contents(rest, query);
    fill(place, ...parts);
    const token = place.querySelector(".chosen");
    token?.focus();
    token?.scrollIntoView({ block: "center" });
  } catch (problem) {
    fill(place, el("p", { class: "bad" }, problem.message), back());
  }
}

async function contents(rest, query) {
  if (rest.length === 2) return [back(), await showRollout(rest.join("/"), query)];
  if (rest.length === 1 && rest[0]) return [back(), await showGroup(rest[0], query)];
  const [shown, stages, ledger] = await Promise.all([showList(query), showStages(), showLedger()]);
  list = shown.list;
  return [stages, shown.place, ledger];
}

function back() {
  return el("p", {}, el("a", { href: address("", list.query) }, "← list of rollouts"));
}

async function neighbour(place, rest, go, by) {
  if (rest.length === 0) {
    const links = [...place.querySelectorAll("table.list a")];
    links[Math.min(links.length - 1, Math.max(0, links.indexOf(document.activeElement) + by))]?.focus();
    return;
  }
  if (!list.rows.length) list = { ...(await ask("rollouts")), query: {} };
  const at = list.rows.findIndex((row) => row.id === rest.join("/"));
  let next = at < 0 ? 0 : at + by;
  if (next < 0 || next >= list.rows.length) {
    const offset = list.offset + (next < 0 ? -1 : 1) * Number(list.query.limit ?? 50);
    const found = offset < 0 || offset >= list.total ? null : await ask("rollouts", { ...list.query, offset });
    if (!found?.rows.length) return;
    list = { ...found, query: { ...list.query, offset } };
    next = next < 0 ? list.rows.length - 1 : 0;
  }
  go(address(list.rows[next].id));
}

function sibling(place, go, by) {
  const links = [...place.querySelectorAll("a.sibling")];
  const at = links.findIndex((link) => link.hasAttribute("aria-current"));
  if (at >= 0 && links[at + by]) go(links[at + by].getAttribute("href"));
}
