// The timeline as a table, for screen readers: the newest groups as rows. Rows are reused, so that they keep the focus.
const MAX_ROWS = 60;
const TABLE_SECONDS = 1;

class GroupTable {
  #model;
  #open;
  #rows = new Map();
  #drawn = -Infinity;

  constructor(model, open) {
    this.#model = model;
    this.#open = open;
    byId("as-table").addEventListener("click", () => this.#toggle());
  }

  frame(time) {
    if (byId("table").hidden || time - this.#drawn < 1000 * TABLE_SECONDS) return;
    this.#drawn = time;
    const groups = this.#model.newest.slice(0, MAX_ROWS);
    const ids = new Set(groups.map((group) => group.group_id));
    for (const [id, row] of this.#rows) {
      if (ids.has(id)) continue;
      row.remove();
      this.#rows.delete(id);
    }
    groups.forEach((group, place) => this.#row(group, place));
  }

  #toggle() {
    const shown = byId("table").hidden;
    byId("table").hidden = !shown;
    byId("scroll").hidden = shown;
    byId("as-table").setAttribute("aria-pressed", String(shown));
    this.#drawn = -Infinity;
  }

  #row(group, place) {
    const body = byId("table-rows");
    let row = this.#rows.get(group.group_id);
    if (row === undefined) {
      const open = element("button", { type: "button", class: "link", onclick: () => this.#open(group.group_id) }, short(group.group_id, 16));
      row = element("tr", {}, element("th", { scope: "row" }, open), ...Array.from({ length: 10 }, () => element("td")));
      this.#rows.set(group.group_id, row);
    }
    if (body.children[place] !== row) body.insertBefore(row, body.children[place] ?? null);
    const { running, selected, discarded, tokens } = tally(group);
    const took = ((group.ended ?? this.#model.time) - group.began).toFixed(2);
    const cells = [short(group.prompt_key ?? "–", 14), group.policy, group.size ?? "–", group.started, running, selected];
    [...cells, discarded, count(tokens), took, group.outcome ?? "running"].forEach((value, column) => {
      const cell = row.children[column + 1];
      if (cell.textContent !== String(value)) cell.textContent = value;
    });
  }
}
