// State of the server from its events. Bounded: the oldest ended groups are dropped first.
const MAX_GROUPS = 400;
const MAX_CANDIDATES = 6000;
const RATE_SECONDS = 2;

class Model {
  groups = new Map();
  now = 0;
  running = 0;
  candidates = 0;
  health = null;
  version = 0; // of everything that is drawn
  #receivedAt = 0;
  #rate = { since: 0, tokens: 0, value: null };

  // The server's clock in seconds, which runs while groups run.
  get time() {
    return this.now + (this.running && this.#receivedAt ? (performance.now() - this.#receivedAt) / 1000 : 0);
  }

  get rate() {
    return this.#rate.value;
  }

  // Newest first.
  get newest() {
    return [...this.groups.values()].sort((a, b) => b.began - a.began || (a.group_id < b.group_id ? 1 : -1));
  }

  snapshot(data) {
    this.groups.clear();
    this.#rate = { since: data.now, tokens: 0, value: null };
    this.#merge(data);
    this.#rate.tokens = 0; // generated before the page was opened
  }

  update(data) {
    this.#merge(data);
    const { since, tokens } = this.#rate;
    if (data.now - since >= RATE_SECONDS) this.#rate = { since: data.now, tokens: 0, value: tokens / (data.now - since) };
  }

  #merge(data) {
    [this.now, this.running, this.candidates, this.health] = [data.now, data.running, data.candidates, data.health];
    this.#receivedAt = performance.now();
    for (const id of data.left) this.groups.delete(id);
    for (const news of data.groups) this.#mergeGroup(news);
    this.#trim();
    this.version += 1;
  }

  // Merges the changes of a group. Changes of a group that was dropped are ignored.
  #mergeGroup({ candidates, ...fields }) {
    const whole = fields.began !== undefined;
    const group = whole ? { candidates: [] } : this.groups.get(fields.group_id);
    if (group === undefined) return;
    Object.assign(group, fields);
    for (const news of candidates) {
      const before = group.candidates[news.index] ?? {};
      // A resumed candidate begins with tokens of an earlier batch.
      const tokensBefore = before.tokens ?? news.resumed ?? 0;
      this.#rate.tokens += Math.max(0, (news.tokens ?? tokensBefore) - tokensBefore);
      group.candidates[news.index] = { ...before, ...news };
    }
    this.groups.set(fields.group_id, group);
  }

  // Drops the oldest ended groups beyond the limits.
  #trim() {
    let candidates = 0;
    for (const group of this.groups.values()) candidates += group.candidates.length;
    if (this.groups.size <= MAX_GROUPS && candidates <= MAX_CANDIDATES) return;
    for (const group of this.newest.reverse()) {
      if (this.groups.size <= MAX_GROUPS && candidates <= MAX_CANDIDATES) return;
      if (group.ended === undefined) continue;
      candidates -= group.candidates.length;
      this.groups.delete(group.group_id);
    }
  }
}

// Counts the ends of candidates, and lists their lengths, over all ended groups.
function sumUp(groups) {
  const sum = { ends: Object.fromEntries(ENDS.map((kind) => [kind, 0])), generated: [], returned: [], cut: 0 };
  for (const group of groups) {
    if (group.ended === undefined) continue;
    for (const candidate of group.candidates) {
      const kind = kindOf(candidate);
      sum.ends[kind] = (sum.ends[kind] ?? 0) + 1;
      sum.cut += candidate.cut ? 1 : 0;
      if (kind !== "carried") sum.generated.push(candidate.tokens); // they count in the group that goes on with them
      if (SELECTED.includes(kind)) sum.returned.push(candidate.tokens);
    }
  }
  return sum;
}

const total = (numbers) => numbers.reduce((sum, number) => sum + number, 0);
const mean = (numbers) => (numbers.length ? total(numbers) / numbers.length : 0);
