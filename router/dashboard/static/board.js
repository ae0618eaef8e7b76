// The page: takes messages from the stream, keeps the state, and lets every part draw itself.

import { BusCard } from "./bus.js";
import { Charts } from "./charts.js";
import { Costs } from "./costs.js";
import { el, mark, say } from "./dom.js";
import { EventList } from "./events.js";
import { Figures } from "./figures.js";
import { History, keyOf } from "./history.js";
import { forgetPalette } from "./palette.js";
import { Queue, Usage } from "./queue.js";
import { RequestList, TimelineDialog } from "./requests.js";
import { State } from "./state.js";
import { Stream } from "./stream.js";
import { forgetAllBut, lookOf } from "./tenants.js";
import { tenantWords } from "./words.js";

const KEY = "inflight-key";
const THEME = "inflight-theme";
const THEMES = { system: "light", light: "dark", dark: "system" };
const STATES = {
  connecting: "connecting", live: "live", reconnecting: "reconnecting", full: "too many viewers", locked: "locked", paused: "paused",
};
const SPOKEN_EVERY_MS = 10_000;
const HIDDEN_FOR_MS = 30_000;
const MAX_TENANTS_NAMED = 12;
const MINUTE_MS = 60_000;
const LOOK_UP_AGAIN_MS = 2000;
// So many executors are shown in detail when they come, where the screen has the room.
const OPEN_EXECUTORS = 2;
const WIDE = matchMedia("(min-width: 721px)");

const byId = (id) => document.getElementById(id);
const stillness = matchMedia("(prefers-reduced-motion: reduce)");

class Page {
  constructor() {
    this.state = new State();
    this.cards = new Map();
    this.figures = new Figures(byId("figures"));
    this.history = new History();
    this.queue = new Queue(byId("queue"));
    this.usage = new Usage(byId("usage"));
    this.costs = new Costs(byId("costs"));
    this.events = new EventList(byId("events"), byId("no-event"));
    this.charts = new Charts(byId("charts"), byId("charts-note"));
    this.requests = new RequestList({
      table: byId("requests"), filter: byId("request-filter"), state: byId("request-state"), more: byId("more-requests"), empty: byId("no-request"),
    }, (request) => this.openRequest(request));
    this.found = null;
    this.timelineDrawn = "";
    this.timeline = new TimelineDialog(byId("timeline"));
    this.stream = new Stream((message, isNewest) => this.take(message, isNewest), (name, why) => this.tell(name, why));
    this.model = "";
    this.isPaused = false;
    this.spokenMs = -SPOKEN_EVERY_MS;
    this.frame = null;
    this.chartsMs = 0;
    this.sight = new IntersectionObserver((entries) => this.see(entries), { rootMargin: "200px" });
  }

  start() {
    this.listen();
    this.showTheme();
    this.render(false);
    this.stream.key = remembered(sessionStorage, KEY);
    byId("forget").hidden = this.stream.key === null;
    this.stream.start();
  }

  listen() {
    byId("pause").addEventListener("click", () => this.pause(!this.isPaused));
    byId("tables").addEventListener("click", () => this.showTables());
    byId("theme").addEventListener("click", () => this.nextTheme());
    byId("forget").addEventListener("click", () => this.useKey(null));
    byId("key-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.useKey(byId("key").value.trim());
    });
    byId("model").addEventListener("change", (event) => {
      this.model = event.target.value;
      this.render(false);
    });
    byId("range").addEventListener("change", (event) => {
      this.charts.rangeMs = MINUTE_MS * Number(event.target.value);
      this.render(false);
    });
    byId("details").addEventListener("click", () => this.openDetails());
    addEventListener("resize", () => this.redraw());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.repaint());
    document.addEventListener("visibilitychange", () => this.onVisibility());
  }

  take(message, isNewest) {
    this.history.take(message.board, performance.now());
    this.state.take(message);
    if (document.hidden) return;
    this.costs.ask(this.headers, performance.now(), () => this.costs.show(this.model));
    if (isNewest) this.render(!stillness.matches);
  }

  tell(name, why) {
    const node = byId("connection");
    if (node.dataset.state !== name) node.dataset.state = name;
    say(byId("connection-text"), STATES[name]);
    node.title = why ?? "";
    byId("door").hidden = name !== "locked";
    byId("board").hidden = name === "locked";
    byId("board").dataset.stale = String(name === "reconnecting" || name === "full");
    if (name === "locked") this.askForKey(why);
  }

  askForKey(why) {
    say(byId("key-error"), this.stream.key === null ? "" : `Key rejected: ${why}`);
    byId("key").value = "";
    byId("key").focus();
  }

  useKey(key) {
    this.stream.stop("connecting");
    this.stream.key = key;
    remember(sessionStorage, KEY, key);
    byId("forget").hidden = key === null;
    if (key === null) this.clear();
    this.isPaused = false;
    mark(byId("pause"), "aria-pressed", "false");
    this.stream.start();
  }

  clear() {
    this.state = new State();
    this.history.clear();
    this.costs.clear();
    this.stream.wasLive = false;
    this.render(false);
  }

  pause(isPaused) {
    this.isPaused = isPaused;
    mark(byId("pause"), "aria-pressed", String(isPaused));
    if (isPaused) this.stream.stop("paused");
    else this.stream.start();
  }

  // A page in the background leaves its place to others after a while.
  onVisibility() {
    clearTimeout(this.leaving);
    if (document.hidden) {
      this.leaving = setTimeout(() => this.stream.running && this.stream.stop("paused"), HIDDEN_FOR_MS);
    } else if (!this.isPaused && byId("door").hidden) {
      this.stream.start();
      this.render(false);
    }
  }

  render(animate) {
    const now = performance.now();
    const seen = this.state.of(this.model);
    say(byId("router-id"), this.state.message?.routerId ?? "unknown");
    this.showModels();
    this.showTenants(seen);
    this.showBuses(seen.buses, animate, now);
    const manyModels = this.state.models().length > 1;
    this.queue.show(seen.queues, manyModels);
    this.events.show(this.history.events, this.model);
    const summary = this.figures.show(seen, this.history, this.model);
    this.requests.show(this.history, this.model, now);
    this.costs.show(this.model);
    this.showTimeline(now);
    if (now - this.chartsMs > 900 || !animate || this.chartsVersion !== this.history.version) {
      const tenants = this.history.tenants(this.model, MINUTE_MS);
      this.usage.show(tenants);
      this.usage.draw(this.history, this.model, now, this.charts.rangeMs);
      for (const card of this.cards.values()) card.showTrend(this.history.executor(card.bus.model, card.bus.name, "running"), now, this.charts.rangeMs);
      this.charts.show(this.history, this.model, manyModels, now);
      [this.chartsMs, this.chartsVersion] = [now, this.history.version];
    }
    this.speak(summary, now);
    this.redraw();
  }

  // Shows a request's timeline: what the stream has told of it, else what the router answers when it is asked.
  openRequest(request) {
    const key = keyOf(request);
    this.timelineDrawn = "";
    this.timeline.open(key);
    if (!this.history.requests.has(key)) this.lookUp(request, key);
    this.showTimeline(performance.now());
  }

  get headers() {
    return this.stream.key === null ? {} : { authorization: `Bearer ${this.stream.key}` };
  }

  async lookUp(request, key) {
    this.foundMs = performance.now();
    const query = new URLSearchParams({ model: request.model, tenant: request.tenant, id: request.id });
    try {
      const response = await fetch(new URL(`request?${query}`, import.meta.url), { headers: this.headers, cache: "no-store" });
      const answer = await response.json();
      if (this.timeline.key !== key) return;
      if (response.ok) this.found = { ...answer, arrivedMs: performance.now() - answer.ageMs };
      else this.timeline.fail("This router has no timeline of this request. Another router serves it.");
      this.showTimeline(performance.now());
    } catch {
      if (this.timeline.key === key) this.timeline.fail("The router does not respond.");
    }
  }

  showTimeline(now) {
    if (!this.timeline.isOpen) return;
    const key = this.timeline.key;
    const one = this.history.requests.get(key) ?? (this.found && keyOf(this.found) === key ? this.found : undefined);
    if (one === undefined) return;
    // The stream does not tell of one that is not among the recent.
    if (one === this.found && !one.outcome && now - this.foundMs > LOOK_UP_AGAIN_MS) this.lookUp(one, key);
    const drawn = `${key}|${one.revision}|${one.outcome ? 0 : Math.floor(now / 500)}`;
    if (drawn === this.timelineDrawn) return;
    this.timelineDrawn = drawn;
    const live = [...this.state.buses.values()].flatMap((bus) => bus.sequences).find((held) => held.id === one.id && held.tenant === one.tenant);
    this.timeline.show(one, now, one.outcome ? undefined : live);
  }

  // All executors in detail, or none.
  openDetails() {
    const isOpen = ![...this.cards.values()].every((card) => card.isOpen);
    for (const card of this.cards.values()) card.open(isOpen);
    this.tellDetails();
  }

  tellDetails() {
    const areOpen = this.cards.size > 0 && [...this.cards.values()].every((card) => card.isOpen);
    say(byId("details"), areOpen ? "Hide all details" : "Show all details");
    byId("details").hidden = this.cards.size < 2;
  }

  showModels() {
    const models = this.state.models();
    const options = ["", ...models];
    const select = byId("model");
    if ([...select.options].map((one) => one.value).join("\n") === options.join("\n")) return;
    if (!options.includes(this.model)) this.model = "";
    select.replaceChildren(...options.map((name) => el("option", { value: name }, name || "all models")));
    select.value = this.model;
  }

  showTenants({ buses, queues }) {
    const tenants = new Set([...queues, ...buses.flatMap((bus) => bus.sequences)].map((one) => one.tenant ?? ""));
    forgetAllBut(tenants);
    const names = [...tenants].sort();
    const key = names.join("\n") + names.length;
    if (key === this.tenantsKey) return;
    this.tenantsKey = key;
    const entries = names.slice(0, MAX_TENANTS_NAMED).map((tenant) => {
      const look = lookOf(tenant);
      return el("li", {}, el("span", { class: "chip", "data-colour": look.colour, "aria-hidden": "true" }, look.initials), tenantWords(tenant));
    });
    if (names.length > MAX_TENANTS_NAMED) entries.push(el("li", {}, `and ${names.length - MAX_TENANTS_NAMED} more`));
    byId("tenants").replaceChildren(...entries);
    byId("tenants").hidden = names.length === 0;
  }

  showBuses(buses, animate, now) {
    byId("no-bus").hidden = buses.length > 0;
    const present = new Set(buses.map((bus) => bus.id));
    for (const [id, card] of this.cards) {
      if (present.has(id)) continue;
      this.sight.unobserve(card.node);
      card.node.remove();
      this.cards.delete(id);
    }
    buses.forEach((bus, at) => {
      const card = this.cards.get(bus.id) ?? this.addCard(bus);
      if (byId("buses").children[at] !== card.node) byId("buses").insertBefore(card.node, byId("buses").children[at] ?? null);
      card.show(bus, animate, now);
    });
    this.tellDetails();
    byId("board").dataset.models = String(this.state.models().length);
  }

  addCard(bus) {
    const card = new BusCard(bus);
    card.open(WIDE.matches && this.state.buses.size <= OPEN_EXECUTORS);
    card.onChange = () => this.redraw();
    card.onToggle = () => this.tellDetails();
    card.onOpen = (request) => this.openRequest(request);
    this.cards.set(bus.id, card);
    this.sight.observe(card.node);
    if (byId("tables").getAttribute("aria-pressed") === "true") this.openTables(card);
    return card;
  }

  see(entries) {
    for (const entry of entries) {
      const card = [...this.cards.values()].find((one) => one.node === entry.target);
      if (card) card.isVisible = entry.isIntersecting;
    }
    this.redraw();
  }

  // For screen readers: how things stand, at most every ten seconds.
  speak(summary, now) {
    if (this.state.message === null || now - this.spokenMs < SPOKEN_EVERY_MS) return;
    this.spokenMs = now;
    say(byId("summary"), summary);
  }

  redraw() {
    this.frame ??= requestAnimationFrame(() => this.draw());
  }

  draw() {
    this.frame = null;
    const now = performance.now();
    for (const card of this.cards.values()) card.draw(now);
    if ([...this.cards.values()].some((card) => card.isMoving(now))) this.redraw();
  }

  showTables() {
    const isOpen = byId("tables").getAttribute("aria-pressed") !== "true";
    mark(byId("tables"), "aria-pressed", String(isOpen));
    openAll(byId("main"), isOpen);
    if (isOpen) for (const card of this.cards.values()) this.openTables(card);
  }

  // Tables of an executor are among its details.
  openTables(card) {
    card.open(true);
    openAll(card.node, true);
  }

  nextTheme() {
    const next = THEMES[remembered(localStorage, THEME) ?? "system"];
    remember(localStorage, THEME, next === "system" ? null : next);
    if (next === "system") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = next;
    this.showTheme();
    this.repaint();
  }

  showTheme() {
    say(byId("theme"), `Theme: ${document.documentElement.dataset.theme ?? "system"}`);
  }

  repaint() {
    forgetPalette();
    for (const card of this.cards.values()) card.repaint();
    this.redraw();
  }
}

function openAll(node, isOpen) {
  for (const details of node.querySelectorAll("details")) details.open = isOpen;
}

// A browser may refuse to keep anything; then nothing is remembered and everything else works.
function remembered(storage, name) {
  try {
    return storage.getItem(name);
  } catch {
    return null;
  }
}

function remember(storage, name, value) {
  try {
    if (value === null) storage.removeItem(name);
    else storage.setItem(name, value);
  } catch {
    return;
  }
}

new Page().start();
