// Connects the parts of the page: it receives records, and draws the map and the details beside it.

import { makeMap } from './map.js';
import { age, showCost, showDetails, showWaiting } from './rail.js';
import { connect, element, mark } from './state.js';

const byId = (id) => document.getElementById(id);
// The token is now in a cookie, and must not stay in the browser's history.
history.replaceState(null, '', '/');

let records = new Map();
let shown = { node: null, gpu: null };
let wantedTier = null;

const map = makeMap(byId('map'), (node, gpu) => {
  if (gpu && shown.gpu?.uuid !== gpu.uuid) byId('said').textContent = `showing ${gpu.name} of ${node}`;
  shown = { node, gpu };
  details();
});

function details() {
  document.body.classList.toggle('has-details', shown.gpu !== null);
  const use = records.get(`use/${shown.node}`);
  const hour = records.get(`hour/${shown.node}`)?.[shown.gpu?.uuid];
  showDetails(byId('details'), shown.node, shown.gpu, { use, hour, unknown: unknownUse() }, map.close);
}

/** Why the use is not known; null where it is known. */
function unknownUse() {
  return (records.get('notes') ?? []).find((note) => note.text.startsWith('usage '))?.text ?? null;
}

function showState(state) {
  const live = byId('live');
  if (live.dataset.state === state) return;
  live.dataset.state = state;
  live.textContent = state === 'live' ? 'live' : 'connection lost: is `kubectl tranche ui` still running?';
}

function showSummary(summary, waiting) {
  const inUse = summary.gpus - summary.freeGpus - summary.closedGpus;
  const percent = summary.gpus ? Math.round(summary.held * 100 / summary.gpus) : 0;
  const item = (name, value, ...more) => element('div', null, element('dt', null, name), element('dd', { class: 'value' }, value),
    ...more.map((it) => element('dd', { class: 'more' }, it)));
  const meter = element('span', { class: 'meter', 'aria-hidden': 'true' }, ['held', 'stranded'].map((part) => {
    const made = element('span', { class: `meter-${part}` });
    made.style.width = `${summary.gpus ? summary[part] * 100 / summary.gpus : 0}%`;
    return made;
  }));
  const closed = summary.closedGpus ? `, ${summary.closedGpus} not offered` : '';
  byId('summary').replaceChildren(
    item('GPUs', String(summary.gpus), `${inUse} in use, ${summary.freeGpus} free${closed}`),
    item('Held', `${percent} %`, meter, `${summary.held.toFixed(2)} GPUs; ${summary.free.toFixed(2)} free, ${summary.stranded.toFixed(2)} stranded`),
    item('Cost per hour', summary.cost, `${summary.heldCost} held, ${summary.freeCost} free, ${summary.strandedCost} stranded`),
    item('Waiting', String(waiting), element('a', { href: '#waiting-title' }, waiting === 1 ? 'pod for a GPU' : 'pods for a GPU')));
}

/**
 * A button for each tier that a GPU serves, and for the pressed one, so that it can be pressed again. A button stays the same
 * element, so that a change of the numbers does not lose a press.
 */
function showTiers(summary) {
  const tiers = Object.entries({ ...summary.tiers, free: summary.freeGpus, closed: summary.closedGpus });
  if (wantedTier && !tiers.some(([tier]) => tier === wantedTier)) tiers.push([wantedTier, 0]);
  const root = byId('tiers');
  const focused = root.contains(document.activeElement) ? document.activeElement : null;
  const before = new Map([...root.children].map((button) => [button.dataset.tier, button]));
  const buttons = tiers.filter(([tier, count]) => count > 0 || tier === wantedTier).map(([tier, count]) => {
    const button = before.get(tier) ?? tierButton(tier);
    button.querySelector('.faint').textContent = String(count);
    button.setAttribute('aria-pressed', String(tier === wantedTier));
    return button;
  });
  for (const [nth, button] of buttons.entries()) {
    if (root.children[nth] !== button) root.insertBefore(button, root.children[nth] ?? null);
  }
  while (root.children.length > buttons.length) root.lastElementChild.remove();
  // A button that was moved or removed has lost the focus.
  if (focused && focused !== document.activeElement) (focused.isConnected ? focused : buttons[0] ?? byId('search')).focus();
}

function tierButton(tier) {
  const name = tier === 'closed' ? 'not offered' : tier;
  const button = element('button', { type: 'button', 'data-tier': tier }, mark(tier), `${name} `, element('span', { class: 'faint' }));
  button.addEventListener('click', () => {
    wantedTier = wantedTier === tier ? null : tier;
    showTiers(records.get('summary'));
    filter({ tier: wantedTier });
  });
  return button;
}

function showNotes(notes) {
  byId('notes').hidden = notes.length === 0;
  byId('notes').querySelector('ul').replaceChildren(...notes.map((note) => element('li', { class: note.isObstacle ? 'obstacle' : null }, note.text)));
}

function filter(wanted) {
  const count = map.filter(wanted);
  const nothing = byId('nothing');
  const gpus = records.get('summary')?.gpus ?? 0;
  nothing.hidden = count > 0 || !records.has('summary');
  nothing.textContent = gpus ? 'No GPU is like that. Clear the search, or press the tier again.' : 'There are no GPUs to show.';
}

function take(all, changed) {
  records = all;
  map.update(all, changed);
  const waiting = showWaiting(byId('waiting'), all);
  const summary = all.get('summary');
  if (summary) {
    showSummary(summary, waiting);
    if (changed.has('summary')) {
      showTiers(summary);
      showCost(byId('cost'), summary);
    }
  }
  if (changed.has('notes')) showNotes(all.get('notes') ?? []);
  if (shown.gpu && (changed.has(`use/${shown.node}`) || changed.has(`hour/${shown.node}`))) details();
  filter({});
}

byId('search').addEventListener('input', (event) => filter({ words: event.target.value.toLowerCase().split(/\s+/).filter(Boolean) }));
document.addEventListener('keydown', (event) => {
  if (event.key === 'Escape' && !byId('details').hidden) map.close();
});
setInterval(() => {
  for (const time of document.querySelectorAll('#waiting time')) time.textContent = age(time.dateTime);
}, 10_000);
connect(take, showState);
