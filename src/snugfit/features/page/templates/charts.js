"use strict";
// Draws the page's charts from their data with Apache ECharts. Texts of a result are only set as text, never as HTML.
(() => {
  const { charts, colours, inks } = JSON.parse(document.getElementById("data").textContent);
  const GIB = 2 ** 30, MIB = 2 ** 20, ROW = 20;
  const FONT = 'system-ui, "Segoe UI", "DejaVu Sans", sans-serif';
  const css = name => getComputedStyle(document.body).getPropertyValue(`--${name}`).trim();
  const bytes = size => size >= GIB ? `${(size / GIB).toFixed(2)} GiB` : size >= MIB ? `${(size / MIB).toFixed(1)} MiB`
    : size >= 1024 ? `${(size / 1024).toFixed(1)} KiB` : `${size} B`;
  const unitOf = top => top >= GIB ? [GIB, "GiB"] : [MIB, "MiB"];
  const still = matchMedia("(prefers-reduced-motion: reduce)").matches;

  const element = (name, className, text = "") => {
    const made = document.createElement(name);
    made.className = className;
    made.textContent = text;
    return made;
  };

  // A tooltip: a heading, and rows of a name, a text, and the colour of the name if it has one.
  const tip = (heading, rows) => {
    const made = element("div", "tip");
    made.append(element("strong", "", heading.replaceAll(".", ".\u200b")));
    for (const [name, text, colour] of rows) {
      const row = element("div", "");
      if (colour) {
        const swatch = element("span", "swatch");
        swatch.style.background = colour;
        row.append(swatch);
      }
      row.append(element("span", "name", name), element("span", "", text));
      made.append(row);
    }
    return made;
  };

  const tooltip = more => ({
    confine: true, backgroundColor: css("paper"), borderColor: css("rule"), transitionDuration: 0, padding: [6, 10], ...more,
  });

  const limitLine = (limit, unit, position) => ({
    silent: true, symbol: "none", data: limit ? [{ yAxis: limit / unit }] : [],
    lineStyle: { color: css("bad"), type: [7, 4], width: 2 },
    label: { position, formatter: `memory limit ${bytes(limit || 0)}`, color: css("bad"), fontSize: 12, fontFamily: FONT,
      textBorderColor: css("paper"), textBorderWidth: 3 },
  });

  const label = more => ({ color: css("ink"), fontSize: 12, fontFamily: FONT, ...more });

  const byteAxis = (top, name, more) => ({
    type: "value", min: 0, max: top, name, nameLocation: "end", nameGap: 10, axisLabel: label({ showMaxLabel: false }),
    nameTextStyle: label({ align: "right" }), splitLine: { lineStyle: { color: css("rule") } }, ...more,
  });

  // The names of passages below their middles. A name without enough room is left out.
  const passageAxis = (passages, width, offset, name) => ({
    type: "value", min: 0, max: 1, position: "bottom", offset, axisLine: { show: !offset, lineStyle: { color: css("faint") } },
    splitLine: { show: false },
    axisTick: { show: true, length: offset ? 0 : 8, lineStyle: { color: css("faint") }, customValues: passages.map(one => one.start) },
    axisLabel: label({
      color: css("faint"), hideOverlap: true, customValues: passages.map(one => (one.start + one.end) / 2),
      formatter: at => {
        const one = passages.find(passage => passage.start <= at && at <= passage.end);
        const words = one ? name(one, (one.end - one.start) * width) : "";
        return words.length * 7 <= (one ? one.end - one.start : 0) * width ? words : "";
      },
    }),
  });

  const memory = (box, data) => {
    const ends = values => [...values, values[values.length - 1]];
    const totals = data.positions.map((_, at) => data.layers.reduce((sum, layer) => sum + layer.bytes[at], 0));
    const highest = Math.max(...data.reserved, ...totals, data.limit || 0), [unit, name] = unitOf(highest);
    const xs = [...data.positions, 1], width = box.clientWidth - 60, peak = totals[data.peak];
    const points = values => ends(values).map((value, at) => [xs[at], value / unit]);
    const phaseAt = x => (data.phases.find(one => x < one.end) || data.phases[data.phases.length - 1]).name;
    const plain = { type: "line", symbol: "none", emphasis: { disabled: true }, silent: true, animation: false };
    const text = at => `${phaseAt(xs[at])}, ${Math.round(100 * xs[at])} % of the step: ${bytes(totals[Math.min(at, totals.length - 1)])}`;
    const rowsAt = at => {
      const index = Math.min(at, totals.length - 1);
      const rows = data.layers.filter(layer => layer.bytes[index]).map(layer => [layer.kind, bytes(layer.bytes[index]), colours[layer.kind]]);
      return [...rows.reverse(), ["reserved by the allocator", bytes(data.reserved[index])]];
    };
    const at = data.positions[data.peak], rightOf = at > 0.5, isHigh = peak / highest > 0.6;
    const room = Math.min(320, Math.max(at, 1 - at) * width - 24), isLong = data.peak_label.length * 8 > room;
    const option = {
      animation: false, textStyle: { fontFamily: FONT },
      grid: { left: 52, right: 8, top: 30, bottom: data.micro_batches.length ? 48 : 28 },
      tooltip: tooltip({
        trigger: "axis", axisPointer: { type: "line", snap: true, lineStyle: { color: css("ink") }, label: { show: false } },
        formatter: shown => tip(text(shown[0].dataIndex), rowsAt(shown[0].dataIndex)),
      }),
      xAxis: [
        passageAxis(data.phases, width, 0, one => one.name),
        ...(data.micro_batches.length ? [passageAxis(data.micro_batches, width, 20, (one, room) =>
          room > 100 && /^\d+$/.test(one.name) ? `micro-batch ${one.name}` : one.name)] : []),
      ],
      yAxis: byteAxis(highest * 1.06 / unit, name, {}),
      series: [
        ...data.layers.map(layer => ({
          ...plain, stack: "bytes", data: points(layer.bytes), lineStyle: { color: css("paper"), width: 0.5 },
          areaStyle: { color: colours[layer.kind], opacity: 1 },
        })),
        { ...plain, data: points(data.reserved), lineStyle: { color: css("ink"), width: 1.5 }, markLine: limitLine(data.limit, unit, rightOf ? "insideStartTop" : "insideEndTop") },
        {
          ...plain, data: points(totals), lineStyle: { opacity: 0 }, z: 5,
          markArea: {
            silent: true, z: 0, itemStyle: { opacity: 1 },
            data: data.phases.filter(one => one.name === "backward" || one.name === "update").map(one =>
              [{ xAxis: one.start, itemStyle: { color: css(`phase-${one.name}`) } }, { xAxis: one.end }]),
          },
          markPoint: {
            silent: true, symbol: "circle", symbolSize: 10, animation: false,
            itemStyle: { color: css("ink"), borderColor: css("paper"), borderWidth: 2 },
            data: [{ coord: [xs[data.peak], peak / unit] }],
            label: label({
              position: rightOf ? [-8, isHigh ? 16 : -30] : [18, isHigh ? 16 : -30], align: rightOf ? "right" : "left",
              formatter: isLong ? data.peak_label.replace(", ", "\n") : data.peak_label, fontWeight: 600, backgroundColor: css("paper"), borderColor: css("ink"), borderWidth: 1,
              borderRadius: 4, padding: [4, 7], lineHeight: 16, overflow: "break",
              ...(isLong ? { width: Math.min(room, 7.5 * Math.max(...data.peak_label.split(", ").map(part => part.length + 10))) } : {}),
            }),
          },
        },
      ],
    };
    const series = option.series.length - 1;
    return { option, count: xs.length, start: data.peak, show: at => ({ seriesIndex: series, dataIndex: at }), text: at =>
      `${text(at)}: ${rowsAt(at).map(row => row.slice(0, 2).join(" ")).join(", ")}` };
  };

  // ---- the map of modules ---------------------------------------------------------------------------------

  const leaf = (line, short, whole) => ({
    id: `${line.module}\n${line.kind}`, name: short, value: line.bytes, kind: line.kind, path: line.module || "(the loop)",
    about: `${line.kind} ${bytes(line.bytes)}, ${(100 * line.bytes / whole).toFixed(1)} %`,
    itemStyle: { color: colours[line.kind] }, label: { color: inks[line.kind] },
  });

  const branch = (id, name, children, whole) => {
    const value = children.reduce((sum, child) => sum + child.value, 0);
    return { id: `branch ${id}`, name, value, children, path: id, about: `${bytes(value)}, ${(100 * value / whole).toFixed(1)} %`,
      itemStyle: { borderColor: css("raised"), color: css("rule") } };
  };

  const byModule = (lines, whole) => {
    const root = { parts: new Map(), lines: [] };
    for (const line of lines) {
      let node = root;
      for (const part of line.module ? line.module.split(".") : ["(the loop)"]) {
        if (!node.parts.has(part)) node.parts.set(part, { parts: new Map(), lines: [] });
        node = node.parts.get(part);
      }
      node.lines.push(line);
    }
    const grow = (node, name, path) => {
      if (node.parts.size + node.lines.length === 1) {
        if (node.lines.length) return leaf(node.lines[0], name, whole);
        const [[part, child]] = node.parts;
        return grow(child, `${name}.${part}`, `${path}.${part}`);
      }
      const parts = [...node.parts].map(([part, child]) => grow(child, part, `${path}.${part}`));
      return branch(path, name, [...parts, ...node.lines.map(line => leaf(line, line.kind, whole))], whole);
    };
    return [...root.parts].map(([part, child]) => grow(child, part, part));
  };

  const byKind = (lines, whole) => [...new Set(lines.map(line => line.kind))].map(kind =>
    branch(kind, kind, lines.filter(line => line.kind === kind).map(line => leaf(line, line.module || "(the loop)", whole)), whole));

  const modules = (box, data) => {
    const whole = data.lines.reduce((sum, line) => sum + line.bytes, 0);
    const tree = (box.dataset.by === "kind" ? byKind : byModule)(data.lines, whole);
    const walk = nodes => nodes.flatMap(node => [node, ...walk(node.children || [])]);
    const nodes = walk(tree);
    // A branch fills the map; so does the branch around a leaf.
    const zoomTo = (chart, id) => {
      const node = nodes.find(one => one.id === id), target = node && node.children ? node : nodes.find(one => (one.children || []).includes(node));
      if (target) chart.dispatchAction({ type: "treemapRootToNode", seriesIndex: 0, targetNodeId: target.id });
    };
    const tail = (path, room) => path.length * 7 <= room ? path : path.split(".").slice(-2).join(".");
    const option = {
      textStyle: { fontFamily: FONT },
      tooltip: tooltip({ formatter: shown => shown.data && shown.data.about ? tip(shown.data.path, [[shown.data.about, "", shown.data.kind && colours[shown.data.kind]]])
        : tip("All bytes at the peak", [[bytes(whole), ""]]) }),
      series: [{
        type: "treemap", name: "all", data: tree, left: 0, right: 0, top: 0, bottom: 34, roam: false, nodeClick: false, visibleMin: 30,
        animation: !still, animationDuration: 0, animationDurationUpdate: 400, squareRatio: 1,
        itemStyle: { borderColor: css("paper"), borderWidth: 1, gapWidth: 1, color: css("raised") },
        upperLabel: label({ show: true, height: ROW, padding: [0, 4], overflow: "truncate", formatter: shown => shown.data.about ? `${shown.name}  ${bytes(shown.value)}` : "" }),
        label: { fontSize: 12, fontFamily: FONT, overflow: "truncate", padding: 3, position: "insideTopLeft", lineHeight: 15,
          formatter: shown => `${tail(shown.name, box.clientWidth / 4)}\n${bytes(shown.value)}` },
        levels: [{ itemStyle: { borderWidth: 0, gapWidth: 2 }, upperLabel: { show: false } }],
        breadcrumb: { left: 0, bottom: 0, height: 24, emptyItemWidth: 18, itemStyle: { color: css("raised"), borderColor: css("rule"), textStyle: label({}) },
          emphasis: { itemStyle: { color: css("rule"), textStyle: label({}) } } },
        emphasis: { itemStyle: { borderColor: css("ink") }, upperLabel: label({ show: true, height: ROW }) },
      }],
    };
    return {
      option, count: nodes.length, start: 0, text: at => `${nodes[at].path}: ${nodes[at].about}`,
      zoom: (chart, at) => zoomTo(chart, nodes[at].id), zoomTo, whole: chart => chart.setOption(option, true),
    };
  };

  // ---- the front of a plan --------------------------------------------------------------------------------

  const front = (box, data) => {
    const points = data.points, [unit, name] = unitOf(Math.max(...points.map(one => one.bytes), data.limit || 0));
    const top = Math.max(...points.map(one => one.bytes), data.limit || 0) * 1.08 / unit;
    const right = Math.max(...points.map(one => one.speed)) || 1, width = box.clientWidth - 68;
    const numbered = [];  // the best first: a point too close to a numbered one has no number
    for (const one of [...points].sort((a, b) => b.best - a.best))
      if (numbered.every(other => Math.abs(one.speed - other.speed) / right * width > 30 || Math.abs(one.bytes - other.bytes) / unit / top * 300 > 18))
        numbered.push(one);
    const stairs = [...points].sort((a, b) => a.speed - b.speed).map(one => [one.speed, one.bytes / unit]);
    const option = {
      animation: false, textStyle: { fontFamily: FONT }, grid: { left: 52, right: 16, top: 30, bottom: 46 },
      tooltip: tooltip({ formatter: shown => tip(`${points[shown.dataIndex].number}: ${points[shown.dataIndex].recipe}`, [[points[shown.dataIndex].label, ""]]) }),
      xAxis: { type: "value", min: 0, name: "samples per second", nameLocation: "middle", nameGap: 26, nameTextStyle: label({ color: css("faint") }),
        axisLabel: label({}), splitLine: { show: false }, axisLine: { lineStyle: { color: css("faint") } } },
      yAxis: byteAxis(top, name, {}),
      series: [
        { type: "line", step: "start", z: 1, symbol: "none", silent: true, data: stairs, lineStyle: { color: css("rule"), width: 1.5 }, markLine: limitLine(data.limit, unit, "insideStartTop") },
        {
          type: "scatter", emphasis: { scale: 1.4 },
          data: points.map(one => ({
            value: [one.speed, one.bytes / unit], symbolSize: one.best ? 18 : 11,
            itemStyle: { color: one.fits ? css("ink") : css("paper"), borderColor: one.best ? css("good") : css("ink"), borderWidth: one.best ? 5 : 1.5 },
            label: label({ show: numbered.includes(one), position: "top", formatter: `${one.number}`, fontWeight: one.best ? 700 : 400 }),
          })),
        },
      ],
    };
    return { option, count: points.length, start: Math.max(0, points.findIndex(one => one.best)), show: at => ({ seriesIndex: 1, dataIndex: at }),
      text: at => `${points[at].number}: ${points[at].recipe}: ${points[at].label}` };
  };

  // ---- drawing, and the keyboard --------------------------------------------------------------------------

  const makers = { MemoryCurve: memory, ModuleMap: modules, Front: front };
  const drawn = [...document.querySelectorAll(".chart")].map(box => {
    const data = charts[Number(box.dataset.chart)], chart = echarts.init(box, null, { renderer: "svg" });
    const output = box.nextElementSibling;
    let made, at;
    const draw = () => {
      chart.resize();
      made = makers[data.kind](box, data);
      chart.setOption(made.option, true);
      at = undefined;
    };
    box.addEventListener("keydown", event => {
      const moves = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };
      if (event.key === "Escape" && made.whole) made.whole(chart);
      else if (event.key === "Enter" && made.zoom && at !== undefined) made.zoom(chart, at);
      else if (event.key === "Home") at = 0;
      else if (event.key === "End") at = made.count - 1;
      else if (event.key in moves) at = at === undefined ? made.start : Math.min(made.count - 1, Math.max(0, at + moves[event.key]));
      else return;
      event.preventDefault();
      if (at === undefined) return;
      output.textContent = made.text(at);
      if (made.show) chart.dispatchAction({ type: "showTip", ...made.show(at) });
    });
    if (data.kind === "ModuleMap") {
      chart.on("click", shown => shown.data && made.zoomTo(chart, shown.data.id));
      const choices = element("div", "switch");
      for (const by of ["module", "kind"]) {
        const button = element("button", "", `By ${by}`);
        button.type = "button";
        button.setAttribute("aria-pressed", String(by === "module"));
        button.addEventListener("click", () => {
          box.dataset.by = by;
          choices.childNodes.forEach(one => one.setAttribute("aria-pressed", String(one === button)));
          draw();
        });
        choices.append(button);
      }
      box.before(choices);
    }
    draw();
    let width = box.clientWidth;
    new ResizeObserver(() => {
      if (box.clientWidth !== width) draw();
      width = box.clientWidth;
    }).observe(box);
    return draw;
  });
  const redraw = () => drawn.forEach(draw => draw());
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  for (const [event, printed] of [["beforeprint", true], ["afterprint", false]])
    addEventListener(event, () => {
      document.body.classList.toggle("printed", printed);
      redraw();
    });
})();
