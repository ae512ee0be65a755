// Every setting of the run with its origin; secrets are masked by the server.

import { getJson } from "../api.js";
import { el, fill, table } from "../dom.js";

export function open(context) {
  const wanted = el("input", { type: "search", placeholder: "filter: key or value (/)", size: 30, oninput: () => show() });
  const changed = el("input", { type: "checkbox", onchange: () => show() });
  const shown = el("div");
  let rows = [];
  wanted.value = context.query.get("filter") || "";

  function show() {
    const text = wanted.value.toLowerCase();
    const kept = rows.filter(([key, value, , isChanged]) => (!changed.checked || isChanged) && `${key} ${value}`.toLowerCase().includes(text));
    fill(shown, el("p", { class: "dim", role: "status" }, `${kept.length} of ${rows.length} settings`),
      table([["setting", "text"], ["value", "text"], ["origin", ""]], kept.map((row) => row.slice(0, 3))));
  }

  getJson("/api/config").then((found) => {
    rows = found.settings.map(([key, value, origin, isChanged]) => [key, JSON.stringify(value), origin, isChanged]);
    if (found.problem) fill(shown, el("p", { class: "bad" }, found.problem));
    else show();
  }, (error) => fill(shown, el("p", { class: "bad" }, error.message)));

  return {
    element: el("div", {}, el("h2", {}, "Configuration"), el("p", {}, wanted, " ", el("label", {}, changed, " only values that differ from their defaults")), shown),
    keys: { "/": ["find a setting", () => wanted.focus()] },
  };
}
