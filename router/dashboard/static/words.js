// How the board says things: numbers with their units, and what the protocol's names mean.

const CONSTRAINTS = {
  STEP_CONSTRAINT_NO_WORK: "nothing waited on the executor",
  STEP_CONSTRAINT_SEATS: "all seats in use",
  STEP_CONSTRAINT_BLOCKS: "no free KV blocks for the next sequence",
  STEP_CONSTRAINT_TOKENS: "token budget of the step (max_num_tokens) used up",
  STEP_CONSTRAINT_PACE: "prefill chunk cut to keep the inter-token latency",
  STEP_CONSTRAINT_STATIC_BATCH: "a static batch was running",
  STEP_CONSTRAINT_TWIN: "the next sequence waits for a prefix that another one computes",
};
const PHASES = {
  SEQUENCE_PHASE_STANDBY: "waiting for a seat",
  SEQUENCE_PHASE_PREPARING: "waiting for its grammar to be compiled",
  SEQUENCE_PHASE_PREFILL: "prefill",
  SEQUENCE_PHASE_DECODE: "decode",
  SEQUENCE_PHASE_PREEMPTED: "preempted",
};
const CLASSES = {
  PRIORITY_CLASS_INTERACTIVE: "interactive",
  PRIORITY_CLASS_STANDARD: "standard",
  PRIORITY_CLASS_BATCH: "batch",
};

const compact = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

// One that a newer router knows is told by its name.
export const constraintWords = (name) => CONSTRAINTS[name] ?? ((name ?? "").replace("STEP_CONSTRAINT_", "").replaceAll("_", " ").toLowerCase() || "unknown");
export const phaseWords = (name) => PHASES[name] ?? "unknown";
export const classWords = (name) => CLASSES[name] ?? "standard";
export const tenantWords = (tenant) => tenant || "other tenants";

export function count(value) {
  return whole.format(Math.round(value ?? 0));
}

// Three figures that matter: 0.42, 4.2, 42, 420, 420K.
export function figure(value) {
  if (value === 0) return "0";
  if (Math.abs(value) >= 100_000) return compact.format(value);
  const size = Math.abs(value);
  return size >= 100 ? whole.format(value) : value.toFixed(size >= 10 ? 1 : 2);
}

export function percent(share) {
  const value = 100 * share;
  return value > 0 && value < 10 ? `${Number(value.toPrecision(2))} %` : `${Math.round(value)} %`;
}

// A duration in the unit that suits it, as [number, unit].
export function duration(ms) {
  if (ms === undefined || ms === null) return ["–", ""];
  if (ms < 1000) return [figure(ms), "ms"];
  if (ms < 120_000) return [figure(ms / 1000), "s"];
  return [whole.format(ms / 60_000), "min"];
}

export function durationText(ms) {
  return duration(ms).join(" ").trim();
}

export function plural(number, one, many = `${one}s`) {
  return `${count(number)} ${number === 1 ? one : many}`;
}
