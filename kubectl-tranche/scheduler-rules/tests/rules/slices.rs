//! ResourceSlices of any driver, generated.

use proptest::prelude::*;
use serde_json::{Value, json};

/// The slices of a cluster with up to three pools.
pub fn any_slices() -> impl Strategy<Value = Vec<Value>> {
    let pools = (
        any_pool("a.example.com", "node-a/one"),
        any_pool("a.example.com", "node-a/two"),
        any_pool("b.example.com", "node-a"),
    );
    let which = prop_oneof![4 => Just(1_usize), 3 => Just(2), 2 => Just(3)];
    (pools, which).prop_map(|((one, two, three), count)| {
        let pools = [one, two, three].into_iter().take(count);
        pools.flatten().collect()
    })
}

/// How a pool differs from a complete one.
#[derive(Clone, Copy, Debug)]
enum State {
    Whole,
    /// A slice is missing.
    Incomplete,
    /// One slice is of an older generation.
    Replaced,
    /// One slice is of a newer generation.
    Replacing,
}

fn any_pool(driver: &'static str, pool: &'static str) -> impl Strategy<Value = Vec<Value>> {
    let counters = prop::collection::vec(
        prop::collection::vec(prop::option::weighted(0.9, 0..9_u32), 2),
        0..=2,
    );
    let slices = prop::collection::vec(
        (any_place(), prop::collection::vec(any_device(), 1..=5)),
        1..=3,
    );
    let state = prop_oneof![
        20 => Just(State::Whole),
        1 => Just(State::Incomplete),
        1 => Just(State::Replaced),
        1 => Just(State::Replacing),
    ];
    (counters, slices, state, prop::bool::weighted(0.02)).prop_map(
        move |(counters, slices, state, duplicate)| {
            let mut specs: Vec<Value> = Vec::new();
            if !counters.is_empty() {
                let sets = counters.iter().enumerate().map(|(number, counters)| {
                    let mut values: serde_json::Map<String, Value> = counters
                        .iter()
                        .enumerate()
                        .filter_map(|(number, value)| {
                            Some((
                                format!("c{number}"),
                                json!({"value": value.as_ref()?.to_string()}),
                            ))
                        })
                        .collect();
                    if values.is_empty() {
                        values.insert("c0".to_owned(), json!({"value": "4"}));
                    }
                    json!({"name": format!("set-{number}"), "counters": values})
                });
                specs.push(
                    json!({"nodeName": "node-a", "sharedCounters": sets.collect::<Vec<_>>()}),
                );
            }
            let mut count = 0;
            for (place, devices) in slices {
                let devices = devices.into_iter().map(|device| {
                    count += 1;
                    let number = if duplicate { 1 } else { count };
                    device.object(number, place, !counters.is_empty())
                });
                let mut spec = json!({"devices": devices.collect::<Vec<_>>()});
                match place {
                    NodeChoice::Node(name) => spec["nodeName"] = json!(name),
                    NodeChoice::All => spec["allNodes"] = json!(true),
                    NodeChoice::Zone(zone) => spec["nodeSelector"] = selector(zone),
                    NodeChoice::ByDevice => spec["perDeviceNodeSelection"] = json!(true),
                }
                // Names are unique in a slice.
                let mut names = std::collections::BTreeSet::new();
                let list = spec["devices"].as_array_mut().unwrap();
                list.retain(|device| names.insert(device["name"].to_string()));
                specs.push(spec);
            }
            let expected = specs.len() + usize::from(matches!(state, State::Incomplete));
            let last = specs.len() - 1;
            let slices = specs.into_iter().enumerate().map(|(number, mut spec)| {
                let generation = match state {
                    State::Replaced if number == last => 1,
                    State::Replacing if number == last => 3,
                    _ => 2,
                };
                spec["driver"] = json!(driver);
                spec["pool"] = json!({
                    "name": pool, "generation": generation, "resourceSliceCount": expected,
                });
                let name = format!("{number}-{}", pool.replace('/', "-"));
                json!({
                    "apiVersion": "resource.k8s.io/v1",
                    "kind": "ResourceSlice",
                    "metadata": {"name": format!("{}-{driver}", name)},
                    "spec": spec,
                })
            });
            slices.collect()
        },
    )
}

/// For which nodes a slice is.
#[derive(Clone, Copy, Debug)]
enum NodeChoice {
    Node(&'static str),
    All,
    Zone(&'static str),
    ByDevice,
}

fn any_place() -> impl Strategy<Value = NodeChoice> {
    prop_oneof![
        10 => Just(NodeChoice::Node("node-a")),
        1 => Just(NodeChoice::Node("node-b")),
        2 => Just(NodeChoice::All),
        1 => Just(NodeChoice::Zone("1")),
        1 => Just(NodeChoice::Zone("2")),
        2 => Just(NodeChoice::ByDevice),
    ]
}

fn selector(zone: &str) -> Value {
    json!({"nodeSelectorTerms": [{"matchExpressions": [{"key": "zone", "operator": "In", "values": [zone]}]}]})
}

#[derive(Clone, Debug)]
struct Device {
    shareable: bool,
    index: Option<i64>,
    kind: Option<&'static str>,
    fast: Option<bool>,
    version: Option<&'static str>,
    root: Option<&'static str>,
    memory: Option<(u64, Policy)>,
    cores: Option<(u64, Policy)>,
    /// Of each set and counter.
    counters: Vec<Vec<Option<u32>>>,
    taint: Option<&'static str>,
    elsewhere: bool,
    binds: bool,
}

#[derive(Clone, Copy, Debug)]
enum Policy {
    None,
    Default(u64),
    Range {
        least: u64,
        step: Option<u64>,
        limited: bool,
    },
    Values,
    Fraction,
}

impl Policy {
    fn object(self, value: u64) -> Option<Value> {
        Some(match self {
            Self::None => return None,
            Self::Default(default) => json!({"default": default.min(value).to_string()}),
            Self::Range {
                least,
                step,
                limited,
            } => {
                let least = least.min(value);
                let mut range = json!({"min": least.to_string()});
                let step = step.filter(|step| least + step <= value);
                if let Some(step) = step {
                    range["step"] = json!(step.to_string());
                }
                if limited {
                    let most = step.map_or(value, |step| least + step * ((value - least) / step));
                    range["max"] = json!(most.to_string());
                }
                json!({"default": least.to_string(), "validRange": range})
            }
            Self::Values => {
                let mut amounts: Vec<u64> =
                    [1, 3, 4].into_iter().filter(|it| *it < value).collect();
                amounts.push(value);
                let default = amounts[0].to_string();
                let values: Vec<String> = amounts.iter().map(u64::to_string).collect();
                json!({"default": default, "validValues": values})
            }
            Self::Fraction => json!({
                "default": "500m", "validRange": {"min": "500m", "step": "250m"},
            }),
        })
    }
}

impl Device {
    fn object(&self, number: usize, place: NodeChoice, has_counters: bool) -> Value {
        let mut attributes = serde_json::Map::new();
        let mut attribute = |name: &str, value: Option<Value>| {
            value.map(|value| attributes.insert(name.to_owned(), value));
        };
        attribute("index", self.index.map(|it| json!({"int": it})));
        attribute("kind", self.kind.map(|it| json!({"string": it})));
        attribute("fast", self.fast.map(|it| json!({"bool": it})));
        attribute("version", self.version.map(|it| json!({"version": it})));
        attribute(
            "other.example.com/root",
            self.root.map(|it| json!({"string": it})),
        );
        let mut device = json!({"name": format!("device-{number}"), "attributes": attributes});
        let mut capacity = serde_json::Map::new();
        for (name, own) in [("memory", self.memory), ("cores", self.cores)] {
            if let Some((value, policy)) = own {
                let mut amount = json!({"value": value.to_string()});
                if let Some(policy) = policy.object(value).filter(|_| self.shareable) {
                    amount["requestPolicy"] = policy;
                }
                capacity.insert(name.to_owned(), amount);
            }
        }
        if !capacity.is_empty() {
            device["capacity"] = json!(capacity);
        }
        if self.shareable {
            device["allowMultipleAllocations"] = json!(true);
        }
        let counters: Vec<Value> = self
            .counters
            .iter()
            .enumerate()
            .filter_map(|(set, amounts)| {
                let counters: serde_json::Map<String, Value> = amounts
                    .iter()
                    .enumerate()
                    .filter_map(|(number, amount)| {
                        Some((
                            format!("c{number}"),
                            json!({"value": amount.as_ref()?.to_string()}),
                        ))
                    })
                    .collect();
                let some = !counters.is_empty();
                some.then(|| json!({"counterSet": format!("set-{set}"), "counters": counters}))
            })
            .collect();
        if has_counters && !counters.is_empty() {
            device["consumesCounters"] = json!(counters);
        }
        if let Some(effect) = self.taint {
            device["taints"] = json!([{"key": "bad", "value": "yes", "effect": effect}]);
        }
        if self.binds {
            device["bindingConditions"] = json!(["ready"]);
            device["bindingFailureConditions"] = json!(["failed"]);
            device["bindsToNode"] = json!(true);
        }
        if matches!(place, NodeChoice::ByDevice) {
            match number % 3 {
                0 => device["allNodes"] = json!(true),
                1 => device["nodeName"] = json!(if self.elsewhere { "node-b" } else { "node-a" }),
                _ => device["nodeSelector"] = selector(if self.elsewhere { "2" } else { "1" }),
            }
        }
        device
    }
}

fn any_policy() -> impl Strategy<Value = Policy> {
    prop_oneof![
        2 => Just(Policy::None),
        2 => (0..5_u64).prop_map(Policy::Default),
        4 => (0..4_u64, prop::option::of(1..4_u64), any::<bool>())
            .prop_map(|(least, step, limited)| Policy::Range { least, step, limited }),
        1 => Just(Policy::Values),
        1 => Just(Policy::Fraction),
    ]
}

fn any_device() -> impl Strategy<Value = Device> {
    let amount = || prop::option::weighted(0.8, (1..12_u64, any_policy()));
    let counters = prop::collection::vec(
        prop::collection::vec(prop::option::weighted(0.6, 0..6_u32), 2),
        0..=2,
    );
    (
        (
            any::<bool>(),
            prop::option::weighted(0.95, 0..3_i64),
            prop::option::weighted(0.95, prop::sample::select(vec!["x", "y"])),
            prop::option::weighted(0.8, any::<bool>()),
            prop::option::weighted(
                0.8,
                prop::sample::select(vec!["1.2.3", "1.10.0", "2.0.0-rc.1"]),
            ),
            prop::option::weighted(0.8, prop::sample::select(vec!["r0", "r1"])),
        ),
        amount(),
        amount(),
        counters,
        prop::option::weighted(
            0.1,
            prop::sample::select(vec!["NoSchedule", "NoExecute", "None"]),
        ),
        prop::bool::weighted(0.2),
        prop::bool::weighted(0.03),
    )
        .prop_map(
            |(
                (shareable, index, kind, fast, version, root),
                memory,
                cores,
                counters,
                taint,
                elsewhere,
                binds,
            )| Device {
                shareable,
                index,
                kind,
                fast,
                version,
                root,
                memory,
                cores,
                counters,
                taint,
                elsewhere,
                binds,
            },
        )
}
