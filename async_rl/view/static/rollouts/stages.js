// Where the time of episodes went: the mean seconds of the latest trained ones, by stage.

import { el, shareBar } from "../dom.js";
import { ask } from "./ask.js";
import { SHORT } from "./life.js";
import { count, seconds } from "./text.js";

export async function showStages() {
  const { episodes, stages } = await ask("stages");
  const place = el("section", { class: "stages" }, el("h2", {}, "Where the time of an episode goes"));
  const total = stages.reduce((sum, [, took]) => sum + took, 0);
  if (!total) {
    place.append(el("p", { class: "dim" }, "No trained rollout has recorded times yet."));
    return place;
  }
  place.append(
    shareBar(stages.map(([name, took]) => [`${SHORT[name] ?? name} ${seconds(took)},`, took / total])),
    el("p", { class: "dim" }, `Means of the last ${count(episodes)} trained rollouts: ${seconds(total)} each.`),
  );
  return place;
}
