// The page: takes messages from the stream, keeps the state, and lets every part draw itself.

import { BusCard } from "./bus.js";
import { Charts } from "./charts.js";
import { el, mark, say } from "./dom.js";
import { Figures } from "./figures.js";
import { forgetPalette } from "./palette.js";
import { State } from "./state.js";
import { Stop } from "./stop.js";
import { Stream } from "./stream.js";
import { forgetAllBut, lookOf } from "./tenants.js";
import { tenantWords } from "./words.js";

const KEY = "inflight-key";
const THEME = "inflight-theme";
const THEMES = { system: "light", light: "dark", dark: "system" };
const STATES = {
  connecting: "connecting", live: "live", reconnecting: "reconnecting", full: "no place to watch", locked: "locked", paused: "paused",
};
const SPOKEN_EVERY_MS = 10_000;
const HIDDEN_FOR_MS = 30_000;
const MAX_TENANTS_NAMED = 24;

const byId = (id) => document.getElementById(id);
const stillness = matchMedia("(prefers-reduced-motion: reduce)");

class Page {
  constructor() {
    this.state = new State();
    this.cards = new Map();
    this.figures = new Figures(byId("figures"));
    this.stop = new Stop(byId("stop"));
    this.charts = new Charts(byId("charts"), byId("charts-note"));
    this.stream = new Stream((message) => this.take(message), (name, why) => this.tell(name, why));
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
    addEventListener("resize", () => this.redraw());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.repaint());
    document.addEventListener("visibilitychange", () => this.onVisibility());
  }

  take(message) {
    this.state.take(message);
    if (!document.hidden) this.render(!stillness.matches);
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
    say(byId("key-error"), this.stream.key === null ? "" : `That did not open it: ${why}`);
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
    this.stream.wasLive = false;
    this.render(false);
  }

  pause(isPaused) {
    this.isPaused = isPaused;
    mark(byId("pause"), "aria-pressed", String(isPaused));
    if (isPaused) this.stream.stop("paused");
    else this.stream.start();
  }

  // A page that nobody sees leaves its place to others after a while.
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
    say(byId("router-id"), this.state.message?.routerId ?? "not known yet");
    this.showModels();
    this.showTenants(seen);
    this.showBuses(seen.buses, animate, now);
    this.stop.show(seen.queues, this.state.models().length > 1);
    const summary = this.figures.show(seen);
    if (now - this.chartsMs > 900 || !animate) {
      this.charts.show(this.state, this.model);
      this.chartsMs = now;
    }
    this.speak(summary, now);
    this.redraw();
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
  }

  addCard(bus) {
    const card = new BusCard(bus);
    card.onChange = () => this.redraw();
    this.cards.set(bus.id, card);
    this.sight.observe(card.node);
    if (byId("tables").getAttribute("aria-pressed") === "true") openAll(card.node, true);
    return card;
  }

  see(entries) {
    for (const entry of entries) {
      const card = [...this.cards.values()].find((one) => one.node === entry.target);
      if (card) card.isVisible = entry.isIntersecting;
    }
    this.redraw();
  }

  // For who listens: how things stand, at most every ten seconds.
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
