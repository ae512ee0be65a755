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
    const kept = rows.filter(([key, value, origin]) => (!changed.checked || origin !== "default")
      && `${key} ${value}`.toLowerCase().includes(text));
    fill(shown, table([["setting", "text"], ["value", "text"], ["origin", ""]], kept));
  }

  getJson("/api/config").then((found) => {
    rows = found.settings.map(([key, value, origin]) => [key, JSON.stringify(value), origin]);
    if (found.problem) fill(shown, el("p", { class: "bad" }, found.problem));
    else show();
  }, (error) => fill(shown, el("p", { class: "bad" }, error.message)));

  return {
    element: el("div", {}, el("h2", {}, "Configuration"), el("p", {}, wanted, " ", el("label", {}, changed, " without defaults")), shown),
    keys: { "/": ["find a setting", () => wanted.focus()] },
  };
}
