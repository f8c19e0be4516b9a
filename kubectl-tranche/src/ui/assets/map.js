// The map: a section for each node, a tile for each GPU. Only nodes near the visible part have tiles.
//
// Sections are in batches. While it scrolls, a browser checks all observed elements and lays out all siblings of a changed one, which
// would take most of a frame for a thousand sections.

import { element, mark, who } from './state.js';

/** The most tenants with their own line in a tile. */
const LINES = 3;
/** With more nodes than this, a tile shows only the number of its tenants. */
const MANY = 40;
/** Sections in a batch. */
const BATCH = 25;
/** The height of a section that was never filled. */
const HEIGHT = '174px';

/** Makes a map in `root`. `onSelect` gets the node's name and the GPU, or null. */
export function makeMap(root, onSelect) {
  /** The section, the record and the tiles by UUID of each node. */
  const nodes = new Map();
  let records = new Map();
  let filter = { words: [], tier: null };
  let isMany = false;
  /** The GPU that Tab reaches, and the one whose details are shown. */
  let current = null;
  let selected = null;
  /** The tile that Tab reaches. */
  let reached = null;

  const near = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      const node = nodes.get(entry.target.dataset.node);
      if (node) show(node, entry.isIntersecting, entry.boundingClientRect.height);
    }
  }, { rootMargin: '800px 0px' });
  const nearBatches = new IntersectionObserver((entries) => {
    for (const entry of entries) {
      entry.target.isNear = entry.isIntersecting;
      for (const section of entry.target.children) observe(section);
    }
  }, { rootMargin: '2400px 0px' });

  /** Observes a section only while its batch is near the visible part. */
  function observe(section) {
    if (section.parentElement.isNear) near.observe(section);
    else near.unobserve(section);
  }

  function update(all, changed) {
    const focused = document.activeElement?.closest('.tile');
    records = all;
    let isOther = false;
    for (const key of changed) {
      const [kind, name] = split(key);
      if (kind === 'node') {
        const isChanged = all.has(key) ? set(name, all.get(key)) : remove(name);
        isOther ||= isChanged;
      }
      if (kind === 'use' && nodes.get(name)?.isShown) draw(nodes.get(name));
    }
    if (isOther) arrange();
    if (isMany !== nodes.size > MANY) {
      isMany = !isMany;
      root.classList.toggle('many', isMany);
      for (const node of nodes.values()) if (node.isShown) draw(node);
    }
    if (focused) keepFocus();
  }

  /** Restores the focus: to its GPU if the GPU's section was moved, or to the nearest GPU if it is gone or hidden. */
  function keepFocus() {
    const tile = button(current);
    if (tile && tile === document.activeElement) return;
    const all = [...order()];
    const nearest = tile ? current : all.find((place) => compare(place.node, current.node) >= 0) ?? all.at(-1);
    if (nearest) focus(nearest);
    else root.focus();
  }

  /** Sets a node's record; returns whether the node is new. */
  function set(name, record) {
    let node = nodes.get(name);
    const isNew = !node;
    if (!node) {
      const title = element('h3', { id: `node-${name}` }, name);
      const about = element('p', { class: 'about' });
      const problems = element('p', { class: 'problems', hidden: true });
      const grid = element('ul', { class: 'grid', 'aria-labelledby': `node-${name}` });
      const section = element('section', { class: 'node', 'data-node': name, 'aria-labelledby': `node-${name}` },
        element('div', { class: 'node-head' }, title, about), problems, grid);
      section.style.minHeight = HEIGHT;
      node = { name, section, about, problems, grid, tiles: new Map(), isShown: false };
      nodes.set(name, node);
    }
    node.record = record;
    node.texts = record.gpus.map((gpu) => text(name, gpu));
    node.section.style.setProperty('--gpus', record.gpus.length);
    node.about.textContent = about(record);
    node.problems.hidden = record.problems.length === 0;
    node.problems.textContent = record.problems.join(' · ');
    if (node.isShown) draw(node);
    if (selected?.node === name) tell();
    return isNew;
  }

  /** Removes a node; returns whether it existed. */
  function remove(name) {
    const node = nodes.get(name);
    if (!node) return false;
    near.unobserve(node.section);
    node.section.remove();
    nodes.delete(name);
    if (selected?.node === name) select(null);
    return true;
  }

  /** Sorts the sections by name, and divides them into batches. */
  function arrange() {
    const order = [...nodes.keys()].sort(compare);
    for (const [nth, name] of order.entries()) {
      const { section } = nodes.get(name);
      const batch = root.children[Math.floor(nth / BATCH)] ?? addBatch();
      const place = batch.children[nth % BATCH] ?? null;
      if (section === place) continue;
      batch.insertBefore(section, place);
      observe(section);
    }
    while (root.children.length > Math.ceil(order.length / BATCH)) {
      nearBatches.unobserve(root.lastElementChild);
      root.lastElementChild.remove();
    }
    const sorted = order.map((name) => [name, nodes.get(name)]);
    nodes.clear();
    for (const [name, node] of sorted) nodes.set(name, node);
  }

  function addBatch() {
    const batch = element('div', { class: 'batch' });
    root.append(batch);
    nearBatches.observe(batch);
    return batch;
  }

  /** Fills a node's section, or empties it and keeps its height. The caller passes the height, because reading it lays out the page. */
  function show(node, isShown, height) {
    if (node.isShown === isShown) return;
    const hasFocus = node.section.contains(document.activeElement);
    if (!isShown && hasFocus) return;
    node.isShown = isShown;
    if (isShown) {
      node.section.style.minHeight = '';
      draw(node);
    } else {
      // A section that the filter hides has no height.
      node.section.style.minHeight = height ? `${height}px` : HEIGHT;
      node.grid.replaceChildren();
      node.tiles.clear();
      rove();
    }
  }

  function draw(node) {
    const use = records.get(`use/${node.name}`)?.gpus ?? {};
    const left = new Set(node.tiles.keys());
    node.record.gpus.forEach((gpu, nth) => {
      left.delete(gpu.uuid);
      const looks = JSON.stringify([gpu, use[gpu.uuid], isMany]);
      let tile = node.tiles.get(gpu.uuid);
      if (!tile) {
        const button = element('button', {
          type: 'button', class: 'tile', tabindex: '-1', 'data-uuid': gpu.uuid, 'data-node': node.name,
          'aria-describedby': 'keys', 'aria-pressed': 'false', 'aria-controls': 'details',
        });
        tile = { item: element('li', null, button), button, looks: null };
        node.tiles.set(gpu.uuid, tile);
      }
      if (tile.looks !== looks) {
        tile.looks = looks;
        tile.button.replaceChildren(...face(gpu, use[gpu.uuid], isMany));
      }
      tile.item.hidden = !matches(gpu, node.texts[nth]);
      tile.button.setAttribute('aria-pressed', String(selected?.uuid === gpu.uuid));
      if (node.grid.children[nth] !== tile.item) node.grid.insertBefore(tile.item, node.grid.children[nth] ?? null);
    });
    for (const uuid of left) {
      node.tiles.get(uuid).item.remove();
      node.tiles.delete(uuid);
    }
    rove();
  }

  /** Shows the GPUs that pass the filter; returns their number. */
  function apply() {
    let count = 0;
    for (const node of nodes.values()) {
      const shown = node.record.gpus.filter((gpu, nth) => matches(gpu, node.texts[nth]));
      count += shown.length;
      node.section.hidden = shown.length === 0;
      for (const [nth, gpu] of node.record.gpus.entries()) {
        const tile = node.tiles.get(gpu.uuid);
        if (tile) tile.item.hidden = !matches(gpu, node.texts[nth]);
      }
    }
    rove();
    return count;
  }

  function matches(gpu, searched) {
    return (filter.tier === null || (gpu.tier ?? (gpu.isFree ? 'free' : 'closed')) === filter.tier)
      && filter.words.every((word) => searched.includes(word));
  }

  /** The GPUs that pass the filter, in order. */
  function* order() {
    for (const node of nodes.values()) {
      for (const [nth, gpu] of node.record.gpus.entries()) {
        if (matches(gpu, node.texts[nth])) yield { node: node.name, uuid: gpu.uuid };
      }
    }
  }

  /** Makes Tab reach one tile: the current one, or the first. */
  function rove() {
    const wanted = button(current) ?? firstButton();
    if (wanted === reached) return;
    if (reached) reached.tabIndex = -1;
    if (wanted) wanted.tabIndex = 0;
    reached = wanted;
  }

  /** The tile of a GPU, if it is drawn and passes the filter. */
  function button(place) {
    const tile = place && nodes.get(place.node)?.tiles.get(place.uuid);
    return tile && !tile.item.hidden ? tile.button : null;
  }

  function firstButton() {
    for (const node of nodes.values()) {
      const first = node.isShown && node.grid.querySelector('li:not([hidden]) > .tile');
      if (first) return first;
    }
    return null;
  }

  /** Makes a tile the one that Tab reaches. */
  function reach(tile) {
    current = { node: tile.dataset.node, uuid: tile.dataset.uuid };
    rove();
  }

  function focus(place) {
    if (!place) return;
    current = place;
    const node = nodes.get(place.node);
    show(node, true);
    const { button } = node.tiles.get(place.uuid);
    rove();
    button.focus();
    button.scrollIntoView({ block: 'nearest' });
  }

  /** The nearest tile above or below. */
  function vertical(from, step) {
    const here = from.getBoundingClientRect();
    const names = [...nodes.keys()];
    for (let nth = names.indexOf(from.dataset.node); nth >= 0 && nth < names.length; nth += step) {
      const node = nodes.get(names[nth]);
      if (node.section.hidden) continue;
      show(node, true);
      const tiles = [...node.grid.querySelectorAll('li:not([hidden]) > .tile')].map((tile) => [tile, tile.getBoundingClientRect()]);
      const beyond = tiles.filter(([, box]) => (step > 0 ? box.top > here.top + 1 : box.top < here.top - 1));
      if (!beyond.length) continue;
      const distance = ([, box]) => Math.abs(box.top - here.top) * 10 + Math.abs(box.left - here.left);
      const [tile] = beyond.reduce((best, it) => (distance(it) < distance(best) ? it : best));
      return { node: names[nth], uuid: tile.dataset.uuid };
    }
    return null;
  }

  function key(event) {
    const tile = event.target.closest('.tile');
    if (event.key === 'Escape') select(null);
    if (!tile || event.altKey || event.ctrlKey || event.metaKey) return;
    const moves = {
      ArrowRight: 1, ArrowLeft: -1, Home: -Infinity, End: Infinity, ArrowDown: 'down', ArrowUp: 'up',
    };
    const move = moves[event.key];
    if (move === undefined) return;
    event.preventDefault();
    if (typeof move === 'string') return focus(vertical(tile, move === 'down' ? 1 : -1));
    const all = [...order()];
    const here = all.findIndex((place) => place.uuid === tile.dataset.uuid);
    focus(all[Math.max(0, Math.min(all.length - 1, here + move))]);
  }

  function select(place) {
    selected = place;
    for (const tile of root.querySelectorAll('.tile')) {
      tile.setAttribute('aria-pressed', String(tile.dataset.uuid === place?.uuid));
    }
    tell();
  }

  function tell() {
    const gpu = selected && nodes.get(selected.node)?.record.gpus.find((it) => it.uuid === selected.uuid);
    onSelect(gpu ? selected.node : null, gpu ?? null);
  }

  root.addEventListener('click', (event) => {
    const tile = event.target.closest('.tile');
    if (!tile) return;
    reach(tile);
    select(selected?.uuid === tile.dataset.uuid ? null : current);
  });
  root.addEventListener('keydown', key);
  root.addEventListener('focusin', (event) => {
    const tile = event.target.closest('.tile');
    if (tile) reach(tile);
  });

  return {
    /** Sets records; call `filter` afterwards. */
    update,
    /** Closes the details, and moves the focus back to their GPU. */
    close() {
      const was = selected;
      select(null);
      if (was) focus(was);
    },
    /** Shows only GPUs with all words and of the tier, or of any tier if it is null; returns their number. */
    filter(wanted) {
      filter = { ...filter, ...wanted };
      return apply();
    },
  };
}

/** The order of nodes by their names. */
function compare(a, b) {
  return a.localeCompare(b, 'en', { numeric: true });
}

/** The kind of a key, and the rest. */
function split(key) {
  const slash = key.indexOf('/');
  return slash < 0 ? [key, ''] : [key.slice(0, slash), key.slice(slash + 1)];
}

/** The text in which a search looks. */
function text(node, gpu) {
  const tenants = gpu.tenants.flatMap((it) => [it.namespace, it.claim, `${it.namespace}/${it.claim}`, it.device, it.mig ?? '',
    ...it.pods.map((pod) => `${it.namespace}/${pod}`)]);
  return [node, gpu.uuid, gpu.product, gpu.pci, gpu.tier ?? '', ...tenants].join(' ').toLowerCase();
}

function about(record) {
  const products = Map.groupBy(record.gpus, (gpu) => gpu.product || 'GPU');
  const counted = [...products].map(([product, gpus]) => `${gpus.length} × ${product}`);
  return [...counted, record.driver && `driver ${record.driver}`].filter(Boolean).join(' · ');
}

/** The content of a tile: the bar, and its facts in words. */
function face(gpu, use, isMany) {
  const named = isMany ? [] : gpu.tenants.slice(0, LINES);
  const lines = named.map((tenant) => element('span', { class: 'line' },
    element('span', { class: 'who' }, who(tenant)), ' ',
    element('span', { class: 'has' }, tenant.isAdmin ? 'observes' : tenant.has)));
  const more = gpu.tenants.length - lines.length;
  return [
    element('span', { class: 'tile-head' },
      element('span', { class: 'name' }, gpu.name), ' ',
      element('span', { class: 'tier' }, mark(gpu.tier ?? (gpu.isFree ? null : 'closed')), gpu.tier ?? (gpu.isFree ? 'free' : 'not offered')), ' ',
      use && Number.isFinite(use.time) ? element('span', { class: 'busy' }, `${use.time} % busy`) : null),
    bar(gpu),
    ...lines,
    isMany ? element('span', { class: 'line count' }, `${gpu.tenants.length} ${gpu.tenants.length === 1 ? 'claim' : 'claims'}`) : null,
    more > 0 && !isMany ? element('span', { class: 'line more' }, `and ${more} more`) : null,
    element('span', { class: 'line room' }, element('span', null, gpu.room), use ? element('span', { class: 'used' }, ` ${use.memory} used`) : null),
  ].filter(Boolean);
}

function bar(gpu) {
  const segments = gpu.bar.map((segment) => {
    const made = element('span', { class: `segment tier-${segment.tier ?? 'stranded'}` });
    made.style.left = `${segment.at / 10}%`;
    made.style.width = `${segment.size / 10}%`;
    return made;
  });
  return element('span', { class: 'bar', 'aria-hidden': 'true' }, segments);
}
