// Requests to the server. The key is kept only here, in memory.
let apiKey = "";
const RETRY_SECONDS = [0.5, 1, 2, 4, 8];
const SILENT_SECONDS = 15; // the server sends an event every two, unless it is very busy

class Refused extends Error {
  constructor(status, error) {
    super(error?.message ?? `status ${status}`);
    this.status = status;
  }
}

function authHeaders() {
  return apiKey ? { Authorization: `Bearer ${apiKey}` } : {};
}

// Returns a successful answer, or throws its error.
async function checkResponse(answer) {
  if (answer.ok) return answer;
  const body = await answer.json().catch(() => ({}));
  throw new Refused(answer.status, typeof body.error === "object" ? body.error : { message: body.error });
}

async function getJson(path) {
  return (await checkResponse(await fetch(path, { headers: authHeaders() }))).json();
}

// Reads the server's events while the page is visible, and reconnects after a lost connection.
class Following {
  #receive;
  #abort = null;
  #failures = 0;
  #timer = 0;

  constructor(receive) {
    this.#receive = receive;
  }

  start() {
    if (this.#abort !== null) return;
    clearTimeout(this.#timer);
    this.#abort = new AbortController();
    this.#follow(this.#abort);
  }

  stop() {
    clearTimeout(this.#timer);
    this.#abort?.abort();
    this.#abort = null;
  }

  // Reads events until the connection is lost, reports the loss, and reconnects unless a key is needed.
  async #follow(abort) {
    let refused = null;
    try {
      const headers = { Accept: "text/event-stream", ...authHeaders() };
      const answer = await checkResponse(await fetch("v1/live", { headers, signal: abort.signal, cache: "no-store" }));
      await this.#read(answer.body.pipeThrough(new TextDecoderStream()).getReader(), abort);
    } catch (error) {
      if (error instanceof Refused) refused = error;
    }
    if (abort !== this.#abort) return; // stopped, or restarted
    this.#abort = null;
    this.#receive(refused?.status === 401 ? "locked" : "lost", refused?.message ?? "the server does not respond");
    if (refused?.status === 401) return;
    const wait = RETRY_SECONDS[Math.min(this.#failures++, RETRY_SECONDS.length - 1)];
    this.#timer = setTimeout(() => this.start(), 1000 * wait);
  }

  // Splits the stream into events. A silent connection is aborted.
  async #read(reader, abort) {
    let text = "";
    for (;;) {
      const silent = setTimeout(() => abort.abort(), 1000 * SILENT_SECONDS);
      const { value, done } = await reader.read().finally(() => clearTimeout(silent));
      if (done) return;
      const frames = (text + value).split("\n\n");
      text = frames.pop();
      for (const frame of frames) this.#handleEvent(frame);
    }
  }

  // Passes an event on. Comments have no data.
  #handleEvent(frame) {
    const name = /^event: (.*)$/m.exec(frame)?.[1];
    const data = /^data: (.*)$/m.exec(frame)?.[1];
    if (name === undefined || data === undefined) return;
    this.#failures = 0;
    this.#receive(name, JSON.parse(data));
  }
}
