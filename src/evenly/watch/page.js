// Shows what the server tells, as it comes: words, tiles, and charts that are changed in place.
"use strict";
(() => {
  const byId = (id) => document.getElementById(id);
  const offline = {load: () => Promise.reject(new Error("this page fetches nothing"))};
  const charts = new Map();
  let last = 1;
  let chosen = null; // the steps that all charts show; null: all of them

  // Text only ever becomes text: nothing that a record holds can be code here.
  function element(name, attributes = {}, ...children) {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    made.append(...children);
    return made;
  }

  function text(node, words) {
    if (node.textContent !== words) node.textContent = words;
  }

  function pairs(list, facts) {
    if (list.children.length !== facts.length)
      list.replaceChildren(...facts.map(() => element("div", {}, element("dt"), element("dd"))));
    facts.forEach(([name, value], place) => {
      text(list.children[place].firstChild, name);
      text(list.children[place].lastChild, value);
    });
  }

  function head({name, state, tone, alarm, message, summary, facts}) {
    document.title = `${alarm ? "⚠ " : ""}${name}: ${state} · Evenly`;
    document.body.dataset.tone = tone;
    text(byId("name"), name);
    text(byId("state"), state);
    byId("state").dataset.tone = tone;
    text(byId("summary"), summary);
    text(byId("message"), message);
    byId("message").hidden = !message;
    byId("message").dataset.tone = alarm ? "bad" : tone;
    pairs(byId("facts"), facts);
  }

  function tile(rank) {
    const made = element("li", {class: "tile", id: `rank-${rank}`},
      element("h3", {}, element("span", {}, `Rank ${rank}`), element("span", {class: "badge"})),
      element("p", {class: "why"}), element("dl"));
    return made;
  }

  function ranks(all) {
    byId("ranks").hidden = !all.length;
    const list = byId("tiles");
    while (list.children.length > all.length) list.lastChild.remove();
    all.forEach(({rank, state, tone, why, facts, stack}, place) => {
      if (list.children[place]?.id !== `rank-${rank}`) {
        const made = tile(rank);
        if (list.children[place]) list.children[place].replaceWith(made);
        else list.append(made);
      }
      const one = list.children[place];
      one.dataset.tone = tone;
      const badge = one.querySelector(".badge");
      badge.dataset.tone = tone;
      text(badge, state);
      text(one.querySelector(".why"), why);
      one.querySelector(".why").hidden = !why;
      pairs(one.querySelector("dl"), facts);
      stacked(one, rank, stack);
    });
  }

  function stacked(one, rank, stack) {
    let box = one.querySelector("details");
    one.classList.toggle("wide", Boolean(stack));
    if (!stack) {
      box?.remove();
      return;
    }
    if (!box) {
      box = element("details", {open: ""}, element("summary", {}, "Stack, the innermost call first"),
        element("pre", {tabindex: "0", "aria-label": `Stack of rank ${rank}`}));
      one.append(box);
    }
    text(box.querySelector("pre"), stack);
  }

  function table({caption, header, rows, numeric}) {
    return element("div", {class: "scroll", tabindex: "0", role: "region", "aria-label": caption},
      element("table", {class: numeric ? "numeric" : "words"},
        element("caption", {}, caption),
        element("thead", {}, element("tr", {}, ...header.map((name) => element("th", {scope: "col"}, name)))),
        element("tbody", {}, ...rows.map(([first, ...cells]) => element("tr", {},
          element("th", {scope: "row"}, first), ...cells.map((cell) => element("td", {}, cell)))))));
  }

  function section(id, found) {
    const place = byId(id);
    place.hidden = !found;
    place.querySelector(".scroll")?.remove();
    if (found) place.append(table(found));
  }

  // --- charts -------------------------------------------------------------------------------------

  function figure(name, {title, caption, legend}) {
    const tool = (act, sign, words) =>
      element("button", {type: "button", "data-zoom": act, "aria-label": `${words}: ${title}`}, sign);
    const tools = element("div", {class: "tools"},
      tool("in", "+", "Zoom in"), tool("out", "−", "Zoom out"), tool("reset", "Reset", "Show all steps"));
    const made = element("figure", {id: name, "aria-labelledby": `${name}-title`},
      element("div", {class: "head"}, element("h3", {id: `${name}-title`}, title), tools));
    if (legend.length)
      made.append(element("ul", {class: "legend"}, ...legend.map((mark) => {
        const sign = element("span", {class: `mark ${mark.kind}`, "aria-hidden": "true"});
        sign.style.setProperty("--mark", mark.colour);
        return element("li", {}, sign, mark.label);
      })));
    const box = element("div", {class: "chart", id: `${name}-chart`, role: "img"});
    made.append(box);
    if (caption) made.append(element("figcaption", {}, caption));
    made.append(element("details", {}, element("summary", {}, "As numbers")));
    tools.addEventListener("click", (event) => {
      if (event.target.dataset.zoom) zoom(event.target.dataset.zoom);
    });
    box.addEventListener("dblclick", () => zoom("reset"));
    return made;
  }

  // Rows as Vega takes them. It knows them again by identity, so those that stay are kept.
  const named = (columns) => (row) => Object.fromEntries(
    columns.map((name, place) => [name, row[place]]).filter(([, value]) => value !== null));

  function dataset({columns, groups}) {
    const found = Object.entries(groups).map(([key, rows]) => [key, rows.map(named(columns))]);
    return {columns, groups: new Map(found), fresh: true, gone: [], come: []};
  }

  async function begin(name, found) {
    const before = charts.get(name);
    const made = figure(name, found.about);
    if (before) {
      before.view?.finalize();
      seen.unobserve(before.made);
      before.made.replaceWith(made);
    } else byId("figures").append(made);
    const data = new Map(Object.entries(found.data).map(([key, one]) => [key, dataset(one)]));
    const chart = {made, data, words: found.words, view: null, quiet: false};
    charts.set(name, chart);
    byId("curves").hidden = false;
    say(chart);
    made.dataset.seen = before?.made.dataset.seen ?? "yes";
    const box = made.querySelector(".chart");
    const datasets = Object.fromEntries([...data.keys()].map((key) => [key, []]));
    const spec = {...found.about.spec, datasets, params: [{name: "last", value: last}]};
    const embedded = await vegaEmbed(box.appendChild(document.createElement("div")), spec, {
      mode: "vega-lite", renderer: "svg", actions: false, logLevel: 1, loader: offline, ast: false,
    });
    if (charts.get(name) !== chart) { // replaced meanwhile
      embedded.finalize();
      return;
    }
    chart.view = embedded.view;
    chart.known = new Set(embedded.vgSpec.data.map((one) => one.name)); // what no layer draws is left out
    if (chosen) show(chart);
    chart.view.addSignalListener("zoom_step", (_, domain) => {
      if (chart.quiet) return;
      chosen = domain ? [...domain] : null;
      for (const other of charts.values()) if (other !== chart) show(other);
    });
    box.dataset.drawn = "yes";
    await draw(chart);
    seen.observe(made);
  }

  function say(chart) {
    const {alt, header, rows} = chart.words;
    const title = chart.made.querySelector("h3").textContent;
    chart.made.querySelector(".chart").setAttribute("aria-label", alt);
    const details = chart.made.querySelector("details");
    details.querySelector(".scroll")?.remove();
    details.append(table({caption: title, header, rows, numeric: true}));
  }

  function learn(name, found) {
    const chart = charts.get(name);
    if (found.words) {
      chart.words = found.words;
      say(chart);
    }
    for (const [name, news] of Object.entries(found.data)) {
      if (!news.tails) {
        chart.data.set(name, dataset(news));
        continue;
      }
      const own = chart.data.get(name);
      for (const [key, [kept, more]] of Object.entries(news.tails)) {
        const rows = own.groups.get(key) ?? [];
        const come = more.map(named(own.columns));
        own.gone.push(...rows.slice(kept));
        own.come.push(...come);
        own.groups.set(key, [...rows.slice(0, kept), ...come]);
      }
    }
  }

  // A set of changes. The bundle has no vega.changeset, but each insertion makes one and hands it on.
  function changes(view, name) {
    const made = Object.create(view, {pulse: {value: (_, set) => set}}).insert(name, []);
    return typeof made?.remove === "function" ? made : null;
  }

  function tell(view, name, own) {
    if (!own.fresh && !own.gone.length && !own.come.length) return;
    const set = own.fresh ? null : changes(view, name);
    if (set) {
      const gone = new Set(own.gone); // some may have come and gone since the last drawing
      const came = new Set(own.come);
      set.remove(own.gone.filter((row) => !came.has(row))).insert(own.come.filter((row) => !gone.has(row)));
      view.change(name, set);
    } else view.data(name, [...own.groups.values()].flat());
    Object.assign(own, {fresh: false, gone: [], come: []});
  }

  function draw(chart) {
    if (!chart.view || document.hidden || chart.made.dataset.seen !== "yes") return null;
    for (const [name, own] of chart.data) if (chart.known.has(name)) tell(chart.view, name, own);
    chart.quiet = true;
    return chart.view.signal("last", last).runAsync().finally(() => { chart.quiet = false; });
  }

  // What comes while the charts are drawn is drawn with the next turn, all of it at once.
  let painting = null;
  let again = false;

  function paint() {
    again = true;
    painting ??= (async () => {
      try {
        while (again) {
          again = false;
          await Promise.all([...charts.values()].map(draw));
        }
      } finally {
        painting = null;
      }
      point();
    })();
    return painting;
  }

  const seen = new IntersectionObserver((changed) => {
    for (const {target, isIntersecting} of changed) target.dataset.seen = isIntersecting ? "yes" : "no";
    paint();
  }, {rootMargin: "200px"});

  function show(chart) {
    if (!chart.view) return;
    chart.quiet = true;
    chart.view.signal("zoom_step", chosen).runAsync().finally(() => { chart.quiet = false; });
  }

  function zoom(act) {
    const [low, high] = chosen ?? [0, last];
    const middle = (low + high) / 2;
    const half = ((high - low) / 2) * (act === "in" ? 0.5 : 2);
    chosen = act === "reset" || 2 * half >= last ? null : [middle - half, middle + half];
    for (const chart of charts.values()) show(chart);
  }

  // --- what the server tells ----------------------------------------------------------------------

  async function take(found, whole) {
    const began = performance.now();
    if (found.last) last = found.last;
    if (found.head) head(found.head);
    if (found.ranks) ranks(found.ranks);
    if ("numbers" in found) section("numbers", found.numbers);
    if ("events" in found) section("events", found.events);
    const gone = whole ? [...charts.keys()].filter((name) => !(name in found.figures)) : found.gone ?? [];
    for (const name of gone) {
      charts.get(name)?.view?.finalize();
      charts.get(name)?.made.remove();
      charts.delete(name);
    }
    if (!charts.size && !Object.keys(found.figures).length) byId("curves").hidden = true;
    const drawn = [];
    for (const [name, news] of Object.entries(found.figures)) {
      const known = charts.get(name);
      if (news.about && !(known && JSON.stringify(known.about) === JSON.stringify(news.about))) {
        drawn.push(begin(name, news));
        charts.get(name).about = news.about;
      } else learn(name, news);
    }
    if (found.order) arrange(found.order);
    await Promise.all(drawn);
    await paint();
    document.body.dataset.updates = String(Number(document.body.dataset.updates ?? 0) + 1);
    document.body.dataset.took = String(performance.now() - began);
  }

  // What is under a pointer that rests is another element after an update: it is pointed at again.
  let pointer = null;

  function follow() {
    const place = byId("figures");
    place.addEventListener("pointermove", (event) => {
      if (event.isTrusted) pointer = event.buttons ? null : {clientX: event.clientX, clientY: event.clientY};
    });
    place.addEventListener("mouseover", (event) => { // comes by itself when elements change
      const rests = pointer && Math.hypot(event.clientX - pointer.clientX, event.clientY - pointer.clientY) < 1.5;
      if (event.isTrusted && rests) point();
    });
    place.addEventListener("pointerleave", (event) => { if (event.isTrusted) pointer = null; });
    addEventListener("scroll", () => { pointer = null; }, {passive: true});
  }

  function point() {
    const under = pointer && document.elementFromPoint(pointer.clientX, pointer.clientY);
    if (!under?.closest(".chart svg")) return;
    under.dispatchEvent(new PointerEvent("pointermove", {...pointer, bubbles: true, view: window}));
  }

  function arrange(order) {
    const place = byId("figures");
    order.forEach((name, number) => {
      const {made} = charts.get(name);
      if (place.children[number] !== made) place.insertBefore(made, place.children[number]);
    });
  }

  function lost(yes) {
    byId("lost").hidden = !yes;
    document.body.dataset.lost = yes ? "yes" : "no";
  }

  function theme() {
    const root = document.documentElement;
    const button = byId("theme");
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
  follow();
  document.addEventListener("visibilitychange", paint);
  const source = new EventSource("events");
  source.addEventListener("whole", (event) => { lost(false); take(JSON.parse(event.data), true); });
  source.addEventListener("change", (event) => { take(JSON.parse(event.data), false); });
  source.addEventListener("error", () => lost(true));
  addEventListener("pagehide", () => source.close());
})();
