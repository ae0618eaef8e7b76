// What the router has kept: samples of the last fifteen minutes, events, and timelines of requests. Knows no page.
//
// The router tells the age of a sample; times here are the browser's own monotonic clock, so no clock has to agree.

const MAX_REQUESTS = 200;
const MAX_EVENTS = 200;
// Ages of two lines differ by what the network took; a sample keeps the time that it was first told with.
export const HISTORY_MS = 900_000;

export class History {
  constructor() {
    this.clear();
  }

  clear() {
    this.samples = [];
    this.events = new Map();
    this.requests = new Map();
    this.fields = { model: [], executor: [], tenant: [] };
    this.sampleMs = 5000;
    this.version = 0;
  }

  // Takes the `board` part of a line.
  take(board, now) {
    if (!board) return;
    this.version += 1;
    if (board.history) {
      // The first line of a stream has everything.
      this.clear();
      this.version = now;
      this.fields = board.history.fields;
      this.sampleMs = 1000 * board.history.sampleSeconds;
    }
    for (const sample of board.samples ?? []) this.samples.push(this.sampleOf(sample, now));
    while (this.samples.length > 0 && this.samples[0].atMs < now - HISTORY_MS - this.sampleMs) this.samples.shift();
    for (const event of board.events ?? []) {
      this.events.delete(event.id);
      this.events.set(event.id, event);
    }
    while (this.events.size > MAX_EVENTS) this.events.delete(this.events.keys().next().value);
    for (const request of [...(board.requests ?? [])].reverse()) this.takeRequest(request, now);
    while (this.requests.size > MAX_REQUESTS) this.requests.delete(this.requests.keys().next().value);
  }

  takeRequest(request, now) {
    const key = keyOf(request);
    this.requests.delete(key);
    this.requests.set(key, { ...request, arrivedMs: now - request.ageMs });
  }

  sampleOf(sample, now) {
    const models = new Map();
    for (const [name, model] of Object.entries(sample.models)) {
      const named = (kind, rows) => new Map(Object.entries(rows ?? {}).map(([id, row]) => [id, this.named(kind, row)]));
      models.set(name, {
        ...this.named("model", model.figures),
        finished: model.finished ?? {},
        tenants: named("tenant", model.tenants),
        executors: named("executor", model.executors),
      });
    }
    return { atMs: now - sample.ageMs, seconds: sample.seconds, models };
  }

  named(kind, row) {
    return Object.fromEntries(this.fields[kind].map((name, at) => [name, row[at] ?? null]));
  }

  // Rows for a chart: [time, values] with the values that `valuesOf` makes of the models that are seen.
  rows(model, valuesOf) {
    return this.samples.map((sample) => {
      const seen = [...sample.models].filter(([name]) => !model || name === model).map(([, one]) => one);
      return [sample.atMs, seen.length > 0 ? valuesOf(seen, sample.seconds) : null];
    });
  }

  // One executor's rows for a line: [time, value or null].
  executor(model, id, name) {
    return this.samples.map((sample) => [sample.atMs, sample.models.get(model)?.executors.get(id)?.[name] ?? null]);
  }

  // Output tokens per second of tenants, for bands on each other: [time, rates in the order of `tenants`].
  outputOf(model, tenants) {
    return this.samples.map((sample) => {
      const seen = [...sample.models].filter(([name]) => !model || name === model).map(([, one]) => one.tenants);
      return [sample.atMs, tenants.map((tenant) => seen.reduce((all, one) => all + (one.get(tenant)?.outputTokens ?? 0), 0) / sample.seconds)];
    });
  }

  // Tokens of prompts, those of them that were cached, and the seconds of the newest samples of so long.
  lately(model, overMs) {
    const newestMs = this.samples.at(-1)?.atMs ?? 0;
    const sums = [0, 0, 0];
    for (const sample of this.samples) {
      if (sample.atMs <= newestMs - overMs + 1) continue;
      sums[2] += sample.seconds;
      for (const [name, one] of sample.models) {
        if (model && name !== model) continue;
        sums[0] += one.promptTokens ?? 0;
        sums[1] += one.cachedTokens ?? 0;
      }
    }
    return sums;
  }

  // Figures of tenants over the newest samples of so long, by name: running and waiting now, and rates.
  tenants(model, overMs) {
    const newest = this.samples.at(-1);
    if (newest === undefined) return [];
    const recent = this.samples.filter((sample) => sample.atMs > newest.atMs - overMs + 1);
    const seconds = recent.reduce((all, sample) => all + sample.seconds, 0);
    const found = new Map();
    for (const sample of recent) {
      for (const [name, one] of sample.models) {
        if (model && name !== model) continue;
        for (const [tenant, row] of one.tenants) {
          const sum = found.get(tenant) ?? { tenant, running: 0, prompt: 0, output: 0, ended: 0 };
          found.set(tenant, sum);
          sum.prompt += row.promptTokens ?? 0;
          sum.output += row.outputTokens ?? 0;
          sum.ended += row.ended ?? 0;
          if (sample === newest) sum.running += row.running ?? 0;
        }
      }
    }
    const rates = [...found.values()].map((one) => ({
      ...one, promptPerS: one.prompt / Math.max(seconds, 1), outputPerS: one.output / Math.max(seconds, 1),
      endedPerMin: (60 * one.ended) / Math.max(seconds, 1),
    }));
    return rates.sort((a, b) => b.output - a.output || a.tenant.localeCompare(b.tenant));
  }
}

export const keyOf = (request) => `${request.model}\n${request.tenant}\n${request.id}`;
