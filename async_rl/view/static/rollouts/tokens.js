// A row of tokens: probability as shade, version as the colour of the underline, older keys and values as a dotted one.

import { el, fill, visible } from "../dom.js";
import { address, ask } from "./ask.js";
import { count } from "./text.js";

const DEGREES = 67; // neighbouring versions get hues that are far apart, and the same hue comes back after 360 versions

// The colour of a version.
export function hue(version) {
  return ((version * DEGREES) % 360).toString();
}

export async function tokenRow(rollout, number, wanted) {
  const place = el("section", { class: "tokens" });
  const start = wanted === null ? 0 : Math.floor(wanted / 2000) * 2000;
  await show(start, wanted);
  return place;

  async function show(from, token) {
    const row = await ask("tokens", { id: rollout.id, sample: number, start: from });
    const about = el("output", { class: "about-token", "aria-live": "polite" }, "Point at a token, or move with the arrow keys.");
    const spans = row.ids.map((_, index) => tokenSpan(row, index));
    const line = el("div", { class: "token-row", role: "listbox", "aria-label": "tokens" }, ...spans);
    for (const name of ["mouseover", "focusin"]) line.addEventListener(name, (event) => tell(row, indexOf(event.target), about));
    line.addEventListener("click", (event) => choose(indexOf(event.target)));
    line.addEventListener("keydown", move);
    place.replaceChildren(legend(row), line, about, pieces(row, show));
    if (spans.length) spans[0].tabIndex = 0;
    if (token !== null && spans[token - row.start]) mark(token - row.start);
    else if (token !== null) about.textContent = `This row has no token ${token}: it has ${count(row.total)}.`;

    function indexOf(target) {
      return target instanceof HTMLElement && target.dataset.index ? Number(target.dataset.index) : null;
    }
    function mark(index) {
      for (const each of line.querySelectorAll(".chosen")) each.classList.remove("chosen");
      spans[index].classList.add("chosen");
      tell(row, index, about);
    }
    function choose(index) {
      if (index === null) return;
      mark(index);
      spans[index].focus({ preventScroll: true });
      history.replaceState(null, "", address(rollout.id, { sample: number || "", token: row.start + index })); // to be copied
    }
    function move(event) {
      const by = { ArrowLeft: -1, ArrowRight: 1, Home: -Infinity, End: Infinity }[event.key];
      const index = indexOf(event.target);
      if (by === undefined || index === null) return;
      event.preventDefault();
      const next = Math.min(spans.length - 1, Math.max(0, index + by));
      spans[index].tabIndex = -1;
      spans[next].tabIndex = 0;
      spans[next].focus();
    }
  }
}

export function tokenSpan(row, index) {
  const text = row.texts[index];
  const shown = text ? visible(text).replaceAll("\n", "⏎\n") : `⟨${row.ids[index]}⟩`;
  const span = el("span", { class: "token", tabindex: -1, role: "option", "data-index": index }, shown);
  if (!text) span.classList.add("special");
  if (row.logprobs[index] === null) span.classList.add("given");
  else span.style.setProperty("--doubt", `${Math.round(70 * (1 - Math.exp(row.logprobs[index])))}%`);
  if (row.versions[index] !== null) span.style.setProperty("--hue", hue(row.versions[index]));
  if (row.keys[index] !== null) span.classList.add("older-keys");
  return span;
}

function tell(row, index, about) {
  if (index === null) return;
  const { ids, texts, logprobs, versions, keys } = row;
  const facts = [`token ${row.start + index}`, `id ${ids[index]}`];
  if (texts[index]) facts.push(JSON.stringify(visible(texts[index])));
  if (logprobs[index] === null) facts.push("not sampled: prompt or observation");
  else facts.push(`log-probability ${logprobs[index].toFixed(4)} (p ${Math.exp(logprobs[index]).toPrecision(3)})`);
  if (versions[index] !== null) facts.push(`version ${versions[index]}`);
  if (keys[index] !== null) facts.push(`keys and values from version ${keys[index]} on`);
  fill(about, facts.join(" · "));
}

function legend(row) {
  const versions = [...new Set(row.versions.filter((version) => version !== null))].sort((a, b) => a - b);
  const shades = [1, 0.5, 0.1, 0].map((chance) => {
    const shade = el("span", { class: "token" }, chance === 1 ? "p = 1" : chance === 0 ? "0" : chance.toString());
    shade.style.setProperty("--doubt", `${Math.round(70 * (1 - chance))}%`);
    return shade;
  });
  const lines = versions.slice(0, 12).map((version) => {
    const sign = el("span", { class: "token" }, `version ${version}`);
    sign.style.setProperty("--hue", hue(version));
    return sign;
  });
  const parts = [...shades, ...lines, el("span", { class: "token given" }, "not sampled")];
  if (versions.length > 12) parts.splice(parts.length - 1, 0, `and ${versions.length - 12} more versions`);
  if (row.keys.some((keys) => keys !== null)) {
    const sign = el("span", { class: "token older-keys" }, "dotted: keys and values before it are of older weights");
    sign.style.setProperty("--hue", hue(versions.at(-1)));
    parts.push(sign);
  }
  if (!row.has_text) parts.push("the run's tokenizer cannot be opened here, so tokens are shown as ids");
  return el("p", { class: "legend" }, ...parts);
}

function pieces(row, show) {
  const stop = row.start + row.ids.length;
  if (row.ids.length === row.total) return el("p", { class: "dim" }, `${count(row.total)} tokens`);
  const button = (label, from, isPossible) => el("button", { type: "button", disabled: !isPossible, onclick: () => show(from, null) }, label);
  return el(
    "p",
    { class: "dim" },
    `tokens ${count(row.start)} to ${count(stop - 1)} of ${count(row.total)} `,
    button("before", Math.max(0, row.start - 2000), row.start > 0),
    button("after", stop, stop < row.total),
  );
}
