// How things stand by the router's newest message, and the steps of the last seconds. Knows no page.
//
// Times are the router's, which stamps every message: executors' clocks and the reader's may differ.

const WINDOW_MS = 10_000;
const MAX_STEPS = 600;

export class State {
  constructor() {
    this.message = null;
    this.nowMs = 0;
    this.buses = new Map();
  }

  take(message) {
    this.message = message;
    this.nowMs = Number(message.timestampMs ?? 0);
    const present = new Map();
    for (const executor of message.executors ?? []) {
      const id = `${executor.capacity?.model}\n${executor.capacity?.executorId}`;
      const bus = this.buses.get(id) ?? new Bus(id);
      bus.take(executor, this.nowMs);
      present.set(id, bus);
    }
    this.buses = present;
  }

  models() {
    const names = new Set([...this.buses.values()].map((bus) => bus.model));
    for (const one of this.message?.latencies ?? []) names.add(one.model);
    for (const one of this.message?.queues ?? []) names.add(one.model);
    return [...names].sort();
  }

  // Where everything that is seen is of one model, or of all: "".
  of(model) {
    const isSeen = (one) => !model || one.model === model;
    return {
      buses: [...this.buses.values()].filter(isSeen),
      queues: (this.message?.queues ?? []).filter(isSeen),
      latencies: (this.message?.latencies ?? []).filter(isSeen),
    };
  }
}

// One executor.
export class Bus {
  constructor(id) {
    this.id = id;
    this.steps = [];
    this.fresh = [];
    this.newestStep = 0;
    this.counted = [];
  }

  take(executor, nowMs) {
    this.capacity = executor.capacity ?? {};
    this.name = this.capacity.executorId ?? "";
    this.model = this.capacity.model ?? "";
    this.sequences = (executor.sequences ?? []).map(sequenceOf);
    const iterations = executor.iterations ?? [];
    const numSteps = Math.max(Number(iterations.at(-1)?.iter ?? 0), Number(this.capacity.numSteps ?? 0));
    // Fewer steps than before: it has been started again.
    if (numSteps < this.newestStep) Object.assign(this, { steps: [], counted: [], newestStep: 0 });
    this.fresh = iterations.map((one) => stepOf(one, nowMs));
    this.steps.push(...this.fresh);
    this.newestStep = Math.max(this.newestStep, numSteps);
    this.counted.push([nowMs, this.newestStep]);
    this.steps = this.steps.filter((step) => step.heardMs > nowMs - WINDOW_MS).slice(-MAX_STEPS);
    while (this.counted[0][0] < nowMs - WINDOW_MS / 4) this.counted.shift();
    this.blocks = blocksOf(this.capacity, iterations.at(-1)?.kvCacheStats);
  }

  seats() {
    return this.capacity.seatsTotal ?? 0;
  }

  seated() {
    return this.sequences.filter((one) => one.seat !== null);
  }

  standing() {
    return this.sequences.filter((one) => one.seat === null);
  }

  stepsPerSecond() {
    const [firstMs, first] = this.counted[0];
    const [lastMs, last] = this.counted.at(-1);
    return lastMs > firstMs ? (1000 * (last - first)) / (lastMs - firstMs) : 0;
  }

  // What bound the steps of the last ten seconds, as [constraint, share], most frequent first.
  bounds() {
    const numbers = new Map();
    for (const { constraint } of this.steps) numbers.set(constraint, (numbers.get(constraint) ?? 0) + 1);
    return [...numbers].map(([name, number]) => [name, number / this.steps.length]).sort((a, b) => b[1] - a[1]);
  }
}

function sequenceOf(one) {
  const phase = one.phase ?? "";
  const read = { id: one.requestId ?? "", choice: one.choiceIndex ?? 0, tenant: one.tenant ?? "", phase, seat: one.seat ?? null };
  const [prompt, computed, output] = [one.promptTokens ?? 0, one.computedTokens ?? 0, one.outputTokens ?? 0];
  return { ...read, prompt, computed, output, blocks: one.numBlocks ?? 0, reserved: one.reservedBlocks ?? 0 };
}

function stepOf(one, heardMs) {
  const batch = one.inflightBatchingStats ?? {};
  return {
    heardMs,
    number: Number(one.iter ?? 0),
    ms: one.iterLatencyMS ?? 0,
    device: one.deviceMS ?? 0,
    exposed: one.exposedHostMS ?? 0,
    parts: new Map((one.parts ?? []).map((part) => [part.name, part.ms ?? 0])),
    constraint: one.constraint ?? "",
    output: batch.numGenTokens ?? 0,
    prompt: batch.numCtxTokens ?? 0,
    boarded: batch.numBoardedRequests ?? 0,
    left: batch.numCompletedRequests ?? 0,
  };
}

function blocksOf(capacity, cache) {
  const total = cache?.maxNumBlocks ?? capacity.blocksTotal ?? 0;
  const used = (cache ? cache.usedNumBlocks : capacity.blocksUsed) ?? 0;
  const kept = (cache ? cache.evictableNumBlocks : capacity.blocksCached) ?? 0;
  const reserved = Math.max((cache ? cache.reservedNumBlocks : capacity.blocksReserved) ?? 0, 0);
  // What is promised and not in use yet will be taken from what is free, and then from what is kept for its prefix.
  const ahead = Math.min(Math.max(reserved - used, 0), Math.max(total - used, 0));
  const free = Math.max(total - used - kept, 0);
  return { total, used, ahead, kept: Math.max(kept - Math.max(ahead - free, 0), 0), free: Math.max(free - ahead, 0), reserved };
}
