// Statistics of a prompt, and provenance of a group.
const MAX_LISTED = 400;

class Lookup {
  #model;
  #awaited = null; // id of a running group that the user opened

  constructor(model) {
    this.#model = model;
    this.#searchOnSubmit("find-prompt", "prompt-key", (key) => this.prompt(key));
    this.#searchOnSubmit("find-group", "group-id", (id) => this.group(id));
  }

  // Shows the statistics of a prompt.
  async prompt(key) {
    this.#awaited = null;
    byId("prompt-key").value = key;
    await this.#show(`v1/prompts/${encodeURIComponent(key)}`, (stats) => [this.#promptSection(stats)]);
  }

  // Shows the provenance of a group, if it has ended.
  async group(id) {
    byId("group-id").value = id;
    const group = this.#model.groups.get(id);
    this.#awaited = group !== undefined && group.ended === undefined ? id : null;
    if (this.#awaited) {
      const text = `Group ${id} is still running. Its provenance is shown here when it has ended.`;
      return byId("found").replaceChildren(element("p", { class: "muted" }, text));
    }
    await this.#show(`v1/groups/${encodeURIComponent(id)}`, ({ groups }) => groups.map((group) => this.#groupSection(group)));
  }

  // Shows the awaited group when it has ended.
  showAwaited() {
    const ended = this.#awaited && this.#model.groups.get(this.#awaited)?.ended !== undefined;
    if (ended) this.group(this.#awaited);
  }

  // Calls `search` with the text of a field when its form is submitted.
  #searchOnSubmit(form, field, search) {
    byId(form).addEventListener("submit", (event) => {
      event.preventDefault();
      if (byId(field).value.trim()) search(byId(field).value.trim());
    });
  }

  // Shows the elements of an answer, or its error.
  async #show(path, toElements) {
    const found = byId("found");
    try {
      found.replaceChildren(...toElements(await getJson(path)));
    } catch (error) {
      found.replaceChildren(element("p", { class: "bad" }, error.message));
    }
  }

  #promptSection(stats) {
    const rewards = stats.rewards;
    const facts = [
      ["Last group", stats.mean_generated_tokens == null ? "unknown" : `mean ${stats.mean_generated_tokens.toFixed(1)} tokens`],
      ["Finished, truncated, stopped", [stats.finished, stats.truncated, stats.stopped].map((each) => each ?? "–").join(", ")],
      ["Limit", stats.max_tokens == null ? "unknown" : `${count(stats.max_tokens)} tokens`],
      ["Estimated mean", `${stats.estimated_mean_tokens.toFixed(1)} tokens without stops and limit`],
      ["Estimated deviation", stats.estimated_std_tokens == null ? "unknown" : `${stats.estimated_std_tokens.toFixed(1)} tokens`],
      ["Groups, candidates", `${count(stats.groups)}, ${count(stats.candidates)}`],
      ["Weights of the last group", stats.weight_version == null ? "–" : `version ${stats.weight_version}`],
      ["Rewards", rewards ? `${count(rewards.rewarded)}, correct ${percent(rewards.pass_rate)}` : "none reported"],
    ];
    if (rewards) {
      const groups = `${rewards.zero_variance_groups} of ${rewards.rewarded_groups}`;
      const longer = rewards.difference == null ? "–" : `${rewards.difference.toFixed(1)} tokens`;
      facts.push(["Groups with equal rewards", groups], ["Correct ones longer by", longer]);
    }
    return element("section", {}, element("h3", {}, `Prompt ${stats.prompt_key}`), definitionList(facts));
  }

  #groupSection(group) {
    const prompt = group.prompt_key
      ? element("button", { type: "button", class: "link", onclick: () => this.prompt(group.prompt_key) }, shorten(group.prompt_key, 28))
      : "without a key";
    const facts = [
      ["Prompt", prompt],
      ["Policy", group.policy],
      ...(group.auto_choice ? [["Choice of auto", group.auto_choice]] : []),
      ["Outcome", group.error ? `${group.outcome}: ${group.error}` : group.outcome],
      ["Selected of started", `${group.candidates.filter((each) => each.selected_as).length} of ${group.candidates.length}`],
      ["Duration", seconds(group.duration)],
      ["Waited for the tail", group.tail_wait == null ? "–" : seconds(group.tail_wait)],
      ["Tokens generated, returned", `${count(group.generated)}, ${count(group.returned)}`],
      ["Deadline", group.deadline == null ? "none" : `${count(group.deadline)} tokens${group.explored ? ", explored" : ""}`],
      ["Mixed weight versions", group.mixed_versions ? "yes" : "no"],
    ];
    if (group.zero_variance != null) facts.push(["All rewards equal", group.zero_variance ? "yes" : "no"]);
    return element("section", {}, element("h3", {}, `Group ${group.group_id}`), definitionList(facts), this.#candidateTable(group));
  }

  #candidateTable({ candidates }) {
    const turns = candidates.some((each) => each.turns != null);
    const heads = ["#", "Result", "Tokens", ...(turns ? ["Turns"] : []), "Rank", "From–to, s", "Weights", "Reward"];
    const rows = candidates.slice(0, MAX_LISTED).map((each) => {
      const result = KINDS[each.selected_as ?? each.reason] ?? "–";
      const versions = [each.weight_version_start, each.weight_version_end].filter((version) => version != null);
      const times = [each.start, each.stop].map((time) => (time == null ? "" : time.toFixed(2))).join("–");
      const length = turns ? [each.length, each.turns] : [each.length];
      const said = [...length, each.rank ?? "–", times, [...new Set(versions)].join("–") || "–", each.reward ?? "–"];
      const cells = said.map((value) => element("td", {}, String(value)));
      const first = [element("td", {}, String(each.index)), element("td", { class: "left" }, each.cut ? `${result}, cut` : result)];
      return element("tr", {}, ...first, ...cells);
    });
    const left = (name) => ({ scope: "col", class: name === "Result" ? "left" : null });
    const head = element("tr", {}, ...heads.map((name) => element("th", left(name), name)));
    const table = element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows));
    const more = `The first ${MAX_LISTED} of ${candidates.length}.`;
    return element("div", { class: "wide" }, table, candidates.length > MAX_LISTED ? more : null);
  }
}

function definitionList(facts) {
  return element("dl", {}, ...facts.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]));
}
