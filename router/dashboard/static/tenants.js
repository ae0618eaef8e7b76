// How a tenant looks: a colour, a pattern and initials, so that colour is never all that tells them apart.
//
// The colour comes from the tenant's name, so it is the same on every page and after every reload. Where two that are
// here at once would share one, the later takes the next that is free.

export const NUM_COLOURS = 12;
export const NUM_PATTERNS = 4;

const MAX_REMEMBERED = 200;
const looks = new Map();
const OTHERS = { colour: "other", pattern: 0, initials: "··" };

export function lookOf(tenant) {
  if (!tenant) return OTHERS;
  let look = looks.get(tenant);
  if (look === undefined) {
    look = newLook(tenant);
    looks.set(tenant, look);
  }
  return look;
}

function newLook(tenant) {
  const hash = hashOf(tenant);
  const taken = new Set([...looks.values()].map((look) => look.colour));
  let colour = hash % NUM_COLOURS;
  for (let tried = 0; taken.has(colour) && tried < NUM_COLOURS; tried++) colour = (colour + 5) % NUM_COLOURS;
  return { colour, pattern: Math.floor(hash / NUM_COLOURS) % NUM_PATTERNS, initials: initialsOf(tenant) };
}

// FNV-1a.
function hashOf(text) {
  let hash = 0x811c9dc5;
  for (const character of text) hash = Math.imul(hash ^ character.codePointAt(0), 0x01000193) >>> 0;
  return hash;
}

// "globex" → GL, "data-science" → DS, "team-12" → T2.
function initialsOf(tenant) {
  const words = tenant.split(/[^\p{L}\p{N}]+/u).filter(Boolean).map((word) => [...word]);
  if (words.length === 0) return "··";
  const last = words.at(-1);
  const second = words.length === 1 ? (last[1] ?? "") : /\p{N}/u.test(last[0]) ? last.at(-1) : last[0];
  return (words[0][0] + second).toUpperCase();
}

// Forgets tenants that are gone once there are many, so that a page left open for days stays small.
export function forgetAllBut(present) {
  if (looks.size <= MAX_REMEMBERED) return;
  for (const tenant of looks.keys()) {
    if (!present.has(tenant)) looks.delete(tenant);
  }
}
