// What the server told, put together. Bounded: the oldest groups that ended go first.
const MOST_GROUPS = 400;
const MOST_CANDIDATES = 6000;
const RATE_SECONDS = 2;

class Model {
  groups = new Map();
  now = 0;
  running = 0;
  candidates = 0;
  health = null;
  version = 0; // of everything that is drawn
  #heard = 0;
  #rate = { since: 0, tokens: 0, value: null };

  // The server's clock.
  get time() {
    return this.now + (this.running && this.#heard ? (performance.now() - this.#heard) / 1000 : 0);
  }

  get rate() {
    return this.#rate.value;
  }

  // Newest first.
  get newest() {
    return [...this.groups.values()].sort((a, b) => b.began - a.began || (a.group_id < b.group_id ? 1 : -1));
  }

  snapshot(told) {
    this.groups.clear();
    this.#rate = { since: told.now, tokens: 0, value: null };
    this.#merge(told);
    this.#rate.tokens = 0; // generated before anybody looked
  }

  update(told) {
    this.#merge(told);
    const { since, tokens } = this.#rate;
    if (told.now - since >= RATE_SECONDS) this.#rate = { since: told.now, tokens: 0, value: tokens / (told.now - since) };
  }

  #merge(told) {
    [this.now, this.running, this.candidates, this.health] = [told.now, told.running, told.candidates, told.health];
    this.#heard = performance.now();
    for (const id of told.left) this.groups.delete(id);
    for (const news of told.groups) this.#group(news);
    this.#trim();
    this.version += 1;
  }

  #group({ candidates, ...fields }) {
    const whole = fields.began !== undefined;
    const group = whole ? { candidates: [] } : this.groups.get(fields.group_id);
    if (group === undefined) return;
    Object.assign(group, fields);
    for (const news of candidates) {
      const before = group.candidates[news.index] ?? {};
      this.#rate.tokens += Math.max(0, (news.tokens ?? before.tokens ?? 0) - (before.tokens ?? 0));
      group.candidates[news.index] = { ...before, ...news };
    }
    this.groups.set(fields.group_id, group);
  }

  #trim() {
    let candidates = 0;
    for (const group of this.groups.values()) candidates += group.candidates.length;
    if (this.groups.size <= MOST_GROUPS && candidates <= MOST_CANDIDATES) return;
    for (const group of this.newest.reverse()) {
      if (this.groups.size <= MOST_GROUPS && candidates <= MOST_CANDIDATES) return;
      if (group.ended === undefined) continue;
      candidates -= group.candidates.length;
      this.groups.delete(group.group_id);
    }
  }
}

// Numbers of all groups that are kept.
function summed(groups) {
  const sum = { ends: Object.fromEntries(ENDS.map((kind) => [kind, 0])), generated: [], returned: [], cut: 0 };
  for (const group of groups) {
    if (group.ended === undefined) continue;
    for (const candidate of group.candidates) {
      const kind = kindOf(candidate);
      sum.ends[kind] = (sum.ends[kind] ?? 0) + 1;
      sum.cut += candidate.cut ? 1 : 0;
      sum.generated.push(candidate.tokens);
      if (SELECTED.includes(kind)) sum.returned.push(candidate.tokens);
    }
  }
  return sum;
}

function tally(group) {
  const found = { running: 0, selected: 0, discarded: 0, tokens: 0 };
  for (const candidate of group.candidates) {
    if (candidate.state in found) found[candidate.state] += 1;
    found.tokens += candidate.tokens;
  }
  return found;
}

const total = (numbers) => numbers.reduce((sum, number) => sum + number, 0);
const mean = (numbers) => (numbers.length ? total(numbers) / numbers.length : 0);
