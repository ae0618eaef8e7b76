// The theme before the first paint: what the reader chose, else the system's.
(() => {
  let chosen = null;
  try {
    chosen = localStorage.getItem("inflight-theme");
  } catch {
    // A browser that keeps nothing for us follows the system.
  }
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
