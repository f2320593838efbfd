// Dark or light: what the reader chose, else what the system says. Loaded before the page is drawn.
"use strict";
(() => {
  const chosen = () => { try { return localStorage.getItem("diloco-theme"); } catch { return null; } };
  const system = matchMedia("(prefers-color-scheme: dark)");
  const apply = () => {
    document.documentElement.dataset.theme = chosen() ?? (system.matches ? "dark" : "light");
    dispatchEvent(new Event("themechange"));
  };
  system.addEventListener("change", apply);
  window.switchTheme = () => {
    const next = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    try { localStorage.setItem("diloco-theme", next); } catch { /* private windows keep nothing */ }
    apply();
    document.documentElement.dataset.theme = next;
  };
  apply();
})();
