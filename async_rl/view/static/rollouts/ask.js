// Requests to the server, and addresses within the page.

import { getJson } from "../api.js";

export function ask(what, query = {}) {
  return getJson(`/api/${what}`, given(query));
}

/** The address of a list (path ""), a group (GROUP) or a rollout (GROUP/SIBLING). */
export function address(path, query = {}) {
  const words = new URLSearchParams(given(query)).toString();
  return `#/rollouts${path ? `/${path}` : ""}${words ? `?${words}` : ""}`;
}

function given(query) {
  return Object.fromEntries(Object.entries(query).filter(([, value]) => value !== "" && value !== null && value !== undefined));
}
