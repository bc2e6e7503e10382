// Statistics of a prompt, and provenance of a group.
const MAX_LISTED = 400;

class Lookup {
  #model;
  #awaited = null; // a running group that the user opened

  constructor(model) {
    this.#model = model;
    this.#on("find-prompt", "prompt-key", (key) => this.prompt(key));
    this.#on("find-group", "group-id", (id) => this.group(id));
  }

  async prompt(key) {
    this.#awaited = null;
    byId("prompt-key").value = key;
    await this.#show(`v1/prompts/${encodeURIComponent(key)}`, (known) => [this.#known(known)]);
  }

  async group(id) {
    byId("group-id").value = id;
    const group = this.#model.groups.get(id);
    this.#awaited = group !== undefined && group.ended === undefined ? id : null;
    if (this.#awaited) {
      const text = `Group ${id} is still running. Its provenance is shown here when it has ended.`;
      return byId("found").replaceChildren(element("p", { class: "muted" }, text));
    }
    await this.#show(`v1/groups/${encodeURIComponent(id)}`, ({ groups }) => groups.map((group) => this.#provenance(group)));
  }

  // Shows the awaited group when it has ended.
  frame() {
    const ended = this.#awaited && this.#model.groups.get(this.#awaited)?.ended !== undefined;
    if (ended) this.group(this.#awaited);
  }

  #on(form, field, look) {
    byId(form).addEventListener("submit", (event) => {
      event.preventDefault();
      if (byId(field).value.trim()) look(byId(field).value.trim());
    });
  }

  async #show(path, drawn) {
    const found = byId("found");
    try {
      found.replaceChildren(...drawn(await ask(path)));
    } catch (error) {
      found.replaceChildren(element("p", { class: "bad" }, error.message));
    }
  }

  #known(known) {
    const rewards = known.rewards;
    const facts = [
      ["Last group", known.mean_generated_tokens == null ? "unknown" : `mean ${known.mean_generated_tokens.toFixed(1)} tokens`],
      ["Finished, truncated, stopped", [known.finished, known.truncated, known.stopped].map((each) => each ?? "–").join(", ")],
      ["Limit", known.max_tokens == null ? "unknown" : `${count(known.max_tokens)} tokens`],
      ["Estimated mean", `${known.estimated_mean_tokens.toFixed(1)} tokens without stops and limit`],
      ["Estimated deviation", known.estimated_std_tokens == null ? "unknown" : `${known.estimated_std_tokens.toFixed(1)} tokens`],
      ["Groups, candidates", `${count(known.groups)}, ${count(known.candidates)}`],
      ["Weights of the last group", known.weight_version == null ? "–" : `version ${known.weight_version}`],
      ["Rewards", rewards ? `${count(rewards.rewarded)}, correct ${percent(rewards.pass_rate)}` : "none reported"],
    ];
    if (rewards) {
      const groups = `${rewards.zero_variance_groups} of ${rewards.rewarded_groups}`;
      const longer = rewards.difference == null ? "–" : `${rewards.difference.toFixed(1)} tokens`;
      facts.push(["Groups with equal rewards", groups], ["Correct ones longer by", longer]);
    }
    return element("section", {}, element("h3", {}, `Prompt ${known.prompt_key}`), listed(facts));
  }

  #provenance(group) {
    const prompt = group.prompt_key
      ? element("button", { type: "button", class: "link", onclick: () => this.prompt(group.prompt_key) }, short(group.prompt_key, 28))
      : "without a key";
    const facts = [
      ["Prompt", prompt],
      ["Policy", group.policy],
      ...(group.chosen ? [["Chosen", group.chosen]] : []),
      ["Outcome", group.error ? `${group.outcome}: ${group.error}` : group.outcome],
      ["Selected of started", `${group.candidates.filter((each) => each.selected_as).length} of ${group.candidates.length}`],
      ["Duration", seconds(group.duration)],
      ["Waited for the tail", group.tail_wait == null ? "–" : seconds(group.tail_wait)],
      ["Tokens generated, returned", `${count(group.generated)}, ${count(group.returned)}`],
      ["Deadline", group.deadline == null ? "none" : `${count(group.deadline)} tokens${group.explored ? ", explored" : ""}`],
      ["Mixed weight versions", group.mixed_versions ? "yes" : "no"],
    ];
    if (group.zero_variance != null) facts.push(["All rewards equal", group.zero_variance ? "yes" : "no"]);
    return element("section", {}, element("h3", {}, `Group ${group.group_id}`), listed(facts), this.#candidates(group));
  }

  #candidates({ candidates }) {
    const heads = ["#", "Result", "Tokens", "Rank", "From–to, s", "Weights", "Reward"];
    const rows = candidates.slice(0, MAX_LISTED).map((each) => {
      const result = KINDS[each.selected_as ?? each.reason] ?? "–";
      const versions = [each.weight_version_start, each.weight_version_end].filter((version) => version != null);
      const times = [each.start, each.stop].map((time) => (time == null ? "" : time.toFixed(2))).join("–");
      const said = [each.length, each.rank ?? "–", times, [...new Set(versions)].join("–") || "–", each.reward ?? "–"];
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

function listed(facts) {
  return element("dl", {}, ...facts.flatMap(([name, value]) => [element("dt", {}, name), element("dd", {}, value)]));
}
