// Texts of models and environments: only ever text nodes, and folded where they are long. Numbers as these pages write them.

import { el, visible } from "../dom.js";
import { ask } from "./ask.js";

/** A text of which the server has sent the head; `more` is the query for the next pieces, null if there are none. */
export function folded({ text, length }, more = null) {
  const shown = el("div", { class: "said" }, text);
  let have = characters(text);
  if (have >= length) return shown;
  const label = () => `${more ? "show more: " : ""}${count(length - have)} characters are folded`;
  if (more === null) return el("div", {}, shown, el("p", { class: "dim" }, label()));
  const button = el("button", { type: "button", onclick: next }, label());
  async function next() {
    button.disabled = true;
    const piece = await ask("text", { ...more, start: have });
    shown.append(visible(piece.text));
    have = piece.start + characters(piece.text);
    button.textContent = label();
    button.disabled = false;
    if (have >= length || !piece.text) button.remove();
  }
  return el("div", {}, shown, button);
}

// As the server counts: `length` would count some of them, such as emoji, twice.
function characters(text) {
  return [...text].length;
}

export function count(number) {
  return number.toLocaleString("en-US");
}

export function score(reward) {
  return reward === null || reward === undefined ? "–" : Number(reward.toPrecision(4)).toString();
}

export function seconds(time) {
  if (time < 1) return `${Math.round(time * 1000)} ms`;
  return time < 120 ? `${time.toFixed(1)} s` : `${(time / 60).toFixed(1)} min`;
}
