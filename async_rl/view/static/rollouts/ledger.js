// The ledger of fates: every ticket that was issued is in one row, and the rows add up to 100 %.

import { el } from "../dom.js";
import { address, ask } from "./ask.js";
import { count } from "./text.js";

export async function showLedger() {
  const { ledger } = await ask("fates");
  const place = el("section", { class: "ledger" }, el("h2", {}, "Where every ticket went"));
  if (!ledger) {
    place.append(el("p", { class: "dim" }, "Nothing is recorded before the first step."));
    return place;
  }
  const rows = ledger.rows.map((row) => line(row, ledger.tokens));
  const whole = ledger.rows.reduce((sum, row) => sum + row.permille, 0);
  const total = el("tr", { class: "total" }, el("th", { scope: "row" }, "issued"), cell(count(ledger.issued)), cell(share(whole)), el("td"), cell(tokens(ledger.tokens.generated)), el("td"));
  const isLeft = ledger.rows.some((row) => row.fate.startsWith("left_over/"));
  const open = ledger.tokens.in_flight ? `; ${count(ledger.tokens.in_flight)} of them are of groups ${isLeft ? "that are left over" : "in flight"}` : "";
  place.append(
    el("p", { class: "dim" }, `After step ${ledger.step}. Tokens are those of ended rollouts, prompts included${open}.`),
    el("div", { class: "table" }, el("table", { class: "rows" }, el("thead", {}, el("tr", {}, ...["fate", "tickets", "share", "", "tokens", ""].map((name) => el("th", {}, name)))), el("tbody", {}, ...rows, total))),
  );
  return place;
}

function line(row, spent) {
  const [kind, reason] = row.fate.split("/");
  const bar = el("span", { class: `piece ${kind}` });
  bar.style.setProperty("width", `${row.permille / 10}%`);
  const filter = kind === "dropped" ? reason : kind === "trained" ? "trained" : "";
  const name = row.fate.replace("_", " ").replace("/", ": ");
  return el(
    "tr",
    {},
    el("th", { scope: "row" }, filter ? el("a", { href: address("", { fate: filter }) }, name) : name),
    cell(count(row.tickets)),
    cell(share(row.permille)),
    el("td", { class: "wide" }, el("div", { class: "track" }, bar)),
    cell(tokens(spent[row.fate])),
    el("td", { class: "dim" }, row.help),
  );
}

function cell(text) {
  return el("td", { class: "number" }, text);
}

function share(permille) {
  return `${(permille / 10).toFixed(1)} %`;
}

function tokens(number) {
  return number === undefined ? "" : count(number);
}
