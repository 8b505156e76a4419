// Sets the colours before the first paint; a plain script, so that it runs before the body is read.
"use strict";

(() => {
  const KEY = "autoshard.theme";
  const CHOICES = ["auto", "light", "dark"];

  const read = () => {
    try {
      const value = localStorage.getItem(KEY);
      return CHOICES.includes(value) ? value : "auto";
    } catch {
      return "auto"; // storage is forbidden here: the choice lasts as long as the page
    }
  };

  const apply = (choice) => {
    document.documentElement.dataset.theme = choice;
  };

  apply(read());
  document.addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    const name = () => document.documentElement.dataset.theme;
    const label = () => {
      button.textContent = { auto: "◐ Auto", light: "☀ Light", dark: "☾ Dark" }[name()];
      button.setAttribute("aria-label", `Colours: ${name()}`);
      button.title = "Colours: as the system has them, light, dark";
    };
    label();
    button.addEventListener("click", () => {
      const next = CHOICES[(CHOICES.indexOf(name()) + 1) % CHOICES.length];
      apply(next);
      label();
      try {
        localStorage.setItem(KEY, next);
      } catch {
        // as above
      }
    });
  });
})();
