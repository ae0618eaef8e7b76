// The stream of statistics: one JSON message a line, by fetch, so that a key can go along in a header. Connects again
// by itself, and sooner when the network comes back; asks for a key where the router wants one.

const FIRST_WAIT_MS = 250;
const MAX_WAIT_MS = 5000;
// The router has something to say several times a second, at full load once in some seconds.
const SILENCE_MS = 15_000;

// States: connecting, live, reconnecting, full, locked, paused.
export class Stream {
  constructor(onMessage, onState) {
    this.onMessage = onMessage;
    this.onState = onState;
    this.key = null;
    this.running = null;
    this.retry = null;
    this.waitMs = FIRST_WAIT_MS;
    this.wasLive = false;
    addEventListener("online", () => this.retry?.now());
  }

  start() {
    if (this.running !== null) return;
    this.running = new AbortController();
    this.run(this.running);
  }

  // Ends the stream; `state` is what the reader is told.
  stop(state) {
    this.running?.abort();
    this.running = null;
    this.retry?.now();
    this.onState(state);
  }

  async run(running) {
    this.onState(this.wasLive ? "reconnecting" : "connecting");
    while (!running.signal.aborted) {
      const outcome = await this.read(running);
      if (running.signal.aborted) return;
      if (outcome.state === "locked") {
        this.running = null;
        this.onState("locked", outcome.why);
        return;
      }
      if (outcome.state !== "ended") this.onState(outcome.state, outcome.why);
      await this.pause(outcome.waitMs ?? this.nextWait());
    }
  }

  nextWait() {
    const waitMs = this.waitMs * (0.75 + Math.random() / 2);
    this.waitMs = Math.min(2 * this.waitMs, MAX_WAIT_MS);
    return waitMs;
  }

  pause(waitMs) {
    return new Promise((resolve) => {
      const timer = setTimeout(resolve, waitMs);
      this.retry = { now: () => (clearTimeout(timer), resolve()) };
    });
  }

  // One connection, to its end.
  async read(running) {
    const connection = new AbortController();
    const silence = new Silence(() => connection.abort());
    const end = () => connection.abort();
    running.signal.addEventListener("abort", end);
    try {
      const headers = this.key === null ? {} : { authorization: `Bearer ${this.key}` };
      const response = await fetch(new URL("stats", import.meta.url), { headers, signal: connection.signal, cache: "no-store" });
      if (!response.ok) return refusal(response);
      await this.readLines(response.body, silence);
      return { state: "reconnecting" };
    } catch (error) {
      // Whatever has cut the connection, it is made again.
      return { state: "reconnecting", why: String(error) };
    } finally {
      silence.end();
      connection.abort();
      running.signal.removeEventListener("abort", end);
    }
  }

  async readLines(body, silence) {
    const reader = body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      silence.broken();
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      // Several at once: the browser was busy. The newest says how things stand now; what is new in the others counts.
      lines.filter(Boolean).forEach((line, at, all) => this.deliver(JSON.parse(line), at === all.length - 1));
    }
  }

  deliver(message, isNewest) {
    this.wasLive = true;
    this.waitMs = FIRST_WAIT_MS;
    this.onState("live");
    this.onMessage(message, isNewest);
  }
}

async function refusal(response) {
  const why = (await response.json().catch(() => ({}))).error ?? `HTTP ${response.status}`;
  if (response.status === 401 || response.status === 403) return { state: "locked", why };
  const seconds = Number(response.headers.get("retry-after"));
  return { state: response.status === 503 ? "full" : "reconnecting", why, waitMs: seconds > 0 ? 1000 * seconds : null };
}

// Calls back when nothing has come for too long.
class Silence {
  constructor(onSilence) {
    this.onSilence = onSilence;
    this.timer = null;
    this.broken();
  }

  broken() {
    clearTimeout(this.timer);
    this.timer = setTimeout(this.onSilence, SILENCE_MS);
  }

  end() {
    clearTimeout(this.timer);
  }
}
