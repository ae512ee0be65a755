// How old groups are when they are trained, where their age came from, and what became of every token.

import { ChartGrid } from "../charts.js";
import { el, fill, number, shareBar, table } from "../dom.js";

const CHARTS = [
  { title: "Groups of the step by age", unit: "groups", stacked: true, names: ["mean:staleness/age_*"] },
  { title: "Age of trained groups", unit: "versions", names: ["staleness/mean", "staleness/p95", "staleness/max"] },
  { title: "Where the age came from", unit: "versions", stacked: true, names: ["mean:staleness/in_flight", "mean:staleness/in_queue"] },
  { title: "Slots", unit: "groups", names: ["pace/slots", "buffer/slots_used", "buffer/reserved", "buffer/depth"],
    labels: { "pace/slots": "allowed by the pace", "buffer/slots_used": "used", "buffer/reserved": "rolled out", "buffer/depth": "ready" } },
  { title: "Pace", unit: "steps' worth of groups", names: ["pace/target"] },
  { title: "Dropped groups, since the run began", unit: "groups", names: ["buffer/dropped/*"] },
  { title: "Tokens, since the run began", unit: "tokens", stacked: true, names: ["mean:tokens/trained", "mean:tokens/in_flight", "mean:tokens/dropped/*"],
    labels: { "tokens/trained": "trained, in a checkpoint", "tokens/in_flight": "ready, or trained and in no checkpoint yet" } },
  { title: "Tokens of the step by age", unit: "tokens", stacked: true, names: ["mean:policy/age_*/tokens"] },
];

export function open() {
  const now = el("div");
  const grid = new ChartGrid(CHARTS);
  return {
    element: el("div", {}, now, grid.element),
    names: grid.names,
    update(store) {
      grid.charts[1].spec.bound = store.state.max_age;
      grid.update(store);
      fill(now, fates(store.state), buffered(store.state.live));
    },
    close() { grid.destroy(); },
  };
}

function fates(state) {
  const title = el("h2", {}, "What became of every generated token");
  if (!state.fates.length) return [title, el("p", { class: "dim" }, "The metrics do not have it yet.")];
  const generated = number(state.latest["tokens/generated"]);
  return [title, shareBar(state.fates), el("p", { class: "dim" },
    `${generated} tokens of ended rollouts, prompts included. Those of killed workers are not known.`)];
}

function buffered(live) {
  if (!live) return null;
  const ages = Object.entries(live.ages).map(([age, groups]) => [age, number(groups)]);
  const held = live.buffer;
  return [el("h2", {}, "Ready groups now, by the age that they would be trained at"),
    ages.length ? table([["age", "number"], ["groups", "number"]], ages) : el("p", { class: "dim" }, "No group is ready."),
    el("p", { class: "dim" }, `${number(held.reserved)} groups are rolled out, ${number(held.taken)} trained but in no checkpoint yet; `
      + `${number(held.slots_used)} of ${number(held.slots)} slots are used (${number(live.limits.max_slots)} without a pace).`)];
}
