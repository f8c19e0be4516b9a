// The part beside the map: a GPU's details, the pods that wait, the cost.

import { element, mark } from './state.js';

/** The most waiting pods with their own entry. */
const PODS = 50;
/** Minutes of the curves. */
const HOUR = 60;
const SVG = 'http://www.w3.org/2000/svg';

/** A GPU's details. `use` is its node's use, `hour` the GPU's last hour; `unknown` says why they are missing. */
export function showDetails(root, node, gpu, { use, hour, unknown }, onClose) {
  const hadFocus = root.contains(document.activeElement);
  root.hidden = !gpu;
  if (!gpu) return root.replaceChildren();
  const close = element('button', { type: 'button', class: 'close' }, 'Close');
  close.addEventListener('click', onClose);
  const now = use?.gpus[gpu.uuid];
  const facts = [
    ['Tier', gpu.tier ?? 'none: nobody holds any of it'],
    ['Room', gpu.room],
    ['Product', gpu.product || 'not known'],
    ['Memory', gpu.memory],
    ['Used', now ? inWords(now) : null],
    ['Offered as', gpu.offered.join(', ') || 'nothing'],
    ['Price', gpu.price ? `${gpu.price} an hour${gpu.isDefaultPrice ? ' (a default)' : ''}` : 'none is known for the product'],
    ['Of it idle', gpu.price ? [`${gpu.freePrice} free`, gpu.strandedPrice !== '$0.00' && `${gpu.strandedPrice} stranded`].filter(Boolean).join(', ') : null],
    ['PCI address', gpu.pci || null],
    ['UUID', gpu.uuid],
  ];
  const list = element('dl', { class: 'facts' }, facts.filter(([, value]) => value).map(([name, value]) =>
    element('div', null, element('dt', null, name), element('dd', null, value))));
  root.replaceChildren(
    element('div', { class: 'details-head' }, element('h2', { id: 'details-title' }, `${gpu.name} of ${node}`), close),
    list,
    element('h3', null, span(hour)),
    ...lastHour(hour, unknown),
    element('h3', null, gpu.tenants.length ? 'Held by' : 'Held by nobody'),
    element('ul', { class: 'tenants' }, gpu.tenants.map((tenant) => holder(tenant, use?.claims[tenant.useKey]))),
    ...(gpu.withheld.length ? [element('h3', null, 'Not offered'), element('ul', { class: 'plain' }, gpu.withheld.map((it) => element('li', null, it)))] : []),
  );
  if (hadFocus) close.focus();
}

/** Memory, and the part of the time where it is known. */
function inWords(used) {
  return `${used.memory}${Number.isFinite(used.time) ? ` and ${used.time} % of the time` : ''}`;
}

function holder(tenant, used) {
  const pods = tenant.pods.length ? tenant.pods.join(', ') : 'no pod';
  const more = [
    tenant.isAdmin ? 'observes (admin access)' : null,
    tenant.isReady ? null : 'not prepared yet',
    tenant.cost && `${tenant.cost} an hour`,
    used && `uses ${inWords(used)}`,
    used?.most && `at most ${used.most}`,
    used?.idle && `idle for ${used.idle}`,
  ].filter(Boolean);
  return element('li', null,
    element('p', { class: 'holder' }, mark(tenant.tier), element('strong', null, `${tenant.namespace}/${tenant.claim}`), ' ', element('span', { class: 'has' }, tenant.has)),
    element('p', { class: 'faint' }, `${tenant.tier}, pods: ${pods}`),
    more.length ? element('p', { class: 'faint' }, more.join(' · ')) : null,
    element('p', { class: 'id' }, tenant.mig ?? tenant.device));
}

/** The time that the curves cover: an hour, or the time since the command was started. */
function span(hour) {
  const minutes = hour?.memory.length ?? HOUR;
  if (minutes >= HOUR) return 'Last hour';
  return minutes === 1 ? 'Last minute' : `Last ${minutes} minutes`;
}

/** Two curves, and the same in words. */
function lastHour(hour, unknown) {
  const lines = [['time', 'busy'], ['memory', 'memory']].filter(([key]) => hour?.[key].some((it) => it !== null));
  if (!lines.length) return [element('p', { class: 'faint' }, unknown ?? 'no reading of this GPU yet')];
  const words = lines.map(([key, name]) => {
    const values = hour[key].filter((it) => it !== null);
    const mean = Math.round(values.reduce((sum, it) => sum + it, 0) / values.length);
    return `${name}: ${mean} % on average, ${Math.max(...values)} % at most`;
  });
  const chart = document.createElementNS(SVG, 'svg');
  chart.setAttribute('viewBox', '0 0 240 64');
  chart.setAttribute('preserveAspectRatio', 'none');
  chart.setAttribute('class', 'chart');
  chart.setAttribute('aria-hidden', 'true');
  for (const [key] of lines) {
    const line = document.createElementNS(SVG, 'path');
    line.setAttribute('class', `curve-${key}`);
    line.setAttribute('d', path(hour[key]));
    chart.append(line);
  }
  return [chart, element('ul', { class: 'plain legend' }, lines.map(([key], nth) => element('li', { class: `of-${key}` }, words[nth])))];
}

/** A curve of percents by minute, with gaps where there is no reading. */
function path(values) {
  let wasThere = false;
  return values.map((value, nth) => {
    if (value === null) {
      wasThere = false;
      return '';
    }
    const point = `${wasThere ? 'L' : 'M'}${(nth * 240 / Math.max(values.length - 1, 1)).toFixed(1)} ${(62 - value * 0.6).toFixed(1)}`;
    // A single reading is a dot.
    const isAlone = !wasThere && (nth + 1 === values.length || values[nth + 1] === null);
    wasThere = true;
    return isAlone ? `${point}h.1` : point;
  }).join('');
}

/** Shows the pods that wait, the longest waiting first; returns their number. */
export function showWaiting(root, records) {
  const pods = [...records].filter(([key]) => key.startsWith('pod/')).map(([, pod]) => pod);
  pods.sort((a, b) => (a.since ?? '').localeCompare(b.since ?? '') || a.name.localeCompare(b.name));
  const items = pods.slice(0, PODS).map((pod) => element('li', null,
    element('p', { class: 'holder' }, element('strong', null, `${pod.namespace}/${pod.name}`), ' ',
      pod.since ? element('time', { class: 'faint', datetime: pod.since }, age(pod.since)) : null),
    element('p', { class: 'wants' }, `wants ${pod.wants.join(', ')}`),
    element('p', { class: 'reason' }, pod.reason)));
  if (pods.length > PODS) items.push(element('li', { class: 'faint' }, `and ${pods.length - PODS} more`));
  if (!pods.length) items.push(element('li', { class: 'faint' }, 'no pod waits for a GPU'));
  root.replaceChildren(...items);
  return pods.length;
}

/** Since when, in words. */
export function age(since) {
  const seconds = Math.max(0, Math.round((Date.now() - Date.parse(since)) / 1000));
  if (seconds < 60) return `${seconds} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min`;
  if (seconds < 86_400) return `${Math.floor(seconds / 3600)} h ${Math.floor(seconds % 3600 / 60)} min`;
  return `${Math.floor(seconds / 86_400)} d`;
}

/** What namespaces pay, and what is left. */
export function showCost(root, summary) {
  const row = (name, gpus, cost, kind) => element('tr', { class: kind },
    element('th', { scope: 'row' }, name), element('td', { class: 'number' }, gpus.toFixed(2)), element('td', { class: 'number' }, cost));
  root.querySelector('tbody').replaceChildren(...summary.namespaces.map((it) => row(it.namespace, it.gpus, it.cost)));
  root.querySelector('tfoot').replaceChildren(
    row('free', summary.free, summary.freeCost, 'rest'),
    row('stranded', summary.stranded, summary.strandedCost, 'rest'),
    ...(summary.closed > 0 ? [row('not offered', summary.closed, summary.closedCost, 'rest')] : []),
    row('all', summary.gpus, summary.cost, 'all'));
  root.querySelector('#prices').textContent = [
    summary.defaultPrices > 0 ? `Prices of ${summary.defaultPrices} GPUs are defaults of this release: write yours into the ConfigMap tranche-prices.` : '',
    summary.unpriced.length ? `No price is known for ${summary.unpriced.join(', ')}.` : '',
  ].filter(Boolean).join(' ');
}
