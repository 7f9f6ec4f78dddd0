// Draws the charts; moves the steps of all of them together; keeps the theme. Nothing is fetched.
"use strict";
(() => {
  const charts = JSON.parse(document.getElementById("charts").textContent);
  const views = [];
  const rows = ({columns, rows}) =>
    rows.map((row) => Object.fromEntries(
      columns.map((name, place) => [name, row[place]]).filter(([, value]) => value !== null)));
  const offline = {load: () => Promise.reject(new Error("this page fetches nothing"))};

  async function draw(chart) {
    const datasets = Object.fromEntries(
      Object.entries(chart.data).map(([name, data]) => [name, rows(data)]));
    const box = document.getElementById(`${chart.name}-chart`);
    // Vega gives its element a role of its own; that of the box is to stay.
    const embedded = await vegaEmbed(box.appendChild(document.createElement("div")), {...chart.spec, datasets}, {
      mode: "vega-lite", renderer: "svg", actions: false, logLevel: 1, loader: offline, ast: false,
    });
    const view = embedded.view;
    box.dataset.drawn = "yes";
    if (!chart.zooms) return;
    const own = {view, all: chart.spec.encoding.x.scale.domain, quiet: false};
    views.push(own);
    view.addSignalListener("zoom_step", (_, domain) => {
      if (own.quiet) return;
      for (const other of views) if (other !== own) show(other, domain);
    });
    const tools = document.querySelector(`#${chart.name} .tools`);
    tools.hidden = false;
    tools.addEventListener("click", (event) => {
      const act = event.target.dataset.zoom;
      if (act) zoom(own, act);
    });
    box.addEventListener("dblclick", () => zoom(own, "reset"));
  }

  function show(own, domain) {
    own.quiet = true;
    own.view.signal("zoom_step", domain).runAsync().finally(() => { own.quiet = false; });
  }

  function zoom(own, act) {
    const [low, high] = own.view.signal("zoom_step") ?? own.all;
    const middle = (low + high) / 2;
    const half = ((high - low) / 2) * (act === "in" ? 0.5 : 2);
    const wide = act === "reset" || 2 * half >= own.all[1] - own.all[0];
    for (const one of views) show(one, wide ? own.all : [middle - half, middle + half]);
  }

  function theme() {
    const root = document.documentElement;
    const button = document.getElementById("theme");
    const system = matchMedia("(prefers-color-scheme: dark)");
    const dark = () => (root.dataset.theme ?? (system.matches ? "dark" : "light")) === "dark";
    const label = () => { button.textContent = dark() ? "Light" : "Dark"; };
    button.addEventListener("click", () => {
      root.dataset.theme = dark() ? "light" : "dark";
      label();
    });
    system.addEventListener("change", label);
    button.hidden = false;
    label();
  }

  theme();
  Promise.all(charts.map(draw)).then(() => { document.body.dataset.drawn = "yes"; });
})();
