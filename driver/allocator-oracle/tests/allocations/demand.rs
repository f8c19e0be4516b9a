//! What claims ask for.

use std::ops::Range;

use k8s_openapi::api::resource::v1::ResourceClaim;
use proptest::prelude::*;
use serde_json::{Value, json};
use tranche_api::names::{DRIVER, OVERSUBSCRIBED};
use tranche_api::tier::Tier;

use crate::node::PRODUCTS;

/// A claim of one pod.
#[derive(Clone, Debug)]
pub struct Claim {
    pub requests: Vec<Request>,
    /// A constraint on the attribute `uuid` of all requests' devices.
    pub uuids: Option<Uuids>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Uuids {
    Distinct,
    Same,
}

#[derive(Clone, Debug)]
pub enum Request {
    Exactly(Ask),
    FirstAvailable(Vec<Ask>),
}

impl Request {
    /// The alternatives, the preferred one first.
    pub fn asks(&self) -> &[Ask] {
        match self {
            Self::Exactly(ask) => std::slice::from_ref(ask),
            Self::FirstAvailable(asks) => asks,
        }
    }
}

/// Devices of one kind.
#[derive(Clone, Debug)]
pub struct Ask {
    pub class: Class,
    pub number: Number,
    /// Bytes.
    pub memory: Option<u64>,
    /// Percent.
    pub cores: Option<u64>,
    /// Only this product, by number in [`PRODUCTS`].
    pub product: Option<usize>,
    /// On another GPU than all other requests with this constraint.
    pub apart: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Number {
    Exactly(usize),
    All,
}

/// A DeviceClass of the chart.
#[derive(Clone, Copy, Debug)]
pub enum Class {
    Tier(Tier),
    Oversubscribed,
    Hard,
    Any,
}

impl Class {
    fn name(self) -> String {
        match self {
            Self::Tier(tier) => tier.class_name(),
            Self::Oversubscribed => format!("{OVERSUBSCRIBED}.{DRIVER}"),
            Self::Hard => format!("hard.{DRIVER}"),
            Self::Any => format!("any.{DRIVER}"),
        }
    }

    /// Whether it selects devices of a tier, with or without oversubscribed memory.
    pub fn accepts(self, tier: Tier, over: Option<u32>) -> bool {
        match self {
            Self::Oversubscribed => over.is_some(),
            _ if over.is_some() => false,
            Self::Tier(wanted) => wanted == tier,
            Self::Hard => matches!(tier, Tier::Partition | Tier::Exclusive),
            Self::Any => tier != Tier::Passthrough,
        }
    }
}

impl Ask {
    fn fields(&self) -> Value {
        let mut fields = json!({"deviceClassName": self.class.name()});
        match self.number {
            Number::Exactly(1) => {}
            Number::Exactly(count) => fields["count"] = json!(count),
            Number::All => fields["allocationMode"] = json!("All"),
        }
        let mut requests = serde_json::Map::new();
        if let Some(bytes) = self.memory {
            requests.insert("memory".to_owned(), json!(bytes.to_string()));
        }
        if let Some(percent) = self.cores {
            requests.insert("cores".to_owned(), json!(percent.to_string()));
        }
        if self.apart {
            requests.insert("antiAffinity".to_owned(), json!("1"));
        }
        if !requests.is_empty() {
            fields["capacity"] = json!({"requests": requests});
        }
        if let Some(product) = self.product {
            let name = PRODUCTS[product].0;
            let expression = format!("device.attributes[\"{DRIVER}\"].productName == \"{name}\"");
            fields["selectors"] = json!([{"cel": {"expression": expression}}]);
        }
        fields
    }
}

impl Claim {
    /// The claim as a user creates it.
    pub fn object(&self, name: &str) -> ResourceClaim {
        let requests = self.requests.iter().enumerate().map(|(number, request)| {
            let name = format!("request-{number}");
            match request {
                Request::Exactly(ask) => json!({"name": name, "exactly": ask.fields()}),
                Request::FirstAvailable(asks) => {
                    let asks = asks.iter().enumerate().map(|(number, ask)| {
                        let mut fields = ask.fields();
                        fields["name"] = json!(format!("choice-{number}"));
                        fields
                    });
                    json!({"name": name, "firstAvailable": asks.collect::<Vec<_>>()})
                }
            }
        });
        let constraints = self.uuids.map(|uuids| {
            let kind = match uuids {
                Uuids::Distinct => "distinctAttribute",
                Uuids::Same => "matchAttribute",
            };
            json!([{kind: format!("{DRIVER}/uuid")}])
        });
        serde_json::from_value(json!({
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaim",
            "metadata": {"namespace": "team-a", "name": name, "uid": format!("uid-of-{name}")},
            "spec": {"devices": {
                "requests": requests.collect::<Vec<_>>(),
                "constraints": constraints,
            }},
        }))
        .expect("a claim")
    }
}

/// Sizes that are often a part of a GPU, sometimes all of it, and sometimes more than any GPU has. Prepare refuses less than 1Mi.
fn any_memory() -> impl Strategy<Value = Option<u64>> {
    let gib = |range: Range<u64>| range.prop_map(|gib| Some(gib << 30));
    prop_oneof![
        3 => Just(None),
        8 => gib(1..8),
        3 => gib(8..40),
        1 => gib(40..90),
        1 => (1 << 20..40_u64 << 30).prop_map(Some),
    ]
}

fn any_cores() -> impl Strategy<Value = Option<u64>> {
    prop_oneof![
        6 => Just(None),
        6 => (1..=40_u64).prop_map(Some),
        1 => (41..=100_u64).prop_map(Some),
    ]
}

/// Sizes of memory and cores: mostly those that the class has.
fn any_sizes(class: Class) -> BoxedStrategy<(Option<u64>, Option<u64>)> {
    let sizes = (any_memory(), any_cores());
    match class {
        Class::Tier(Tier::Timeshared) => prop_oneof![9 => Just((None, None)), 1 => sizes].boxed(),
        _ => sizes.boxed(),
    }
}

fn any_ask(numbers: impl Strategy<Value = Number>) -> impl Strategy<Value = Ask> {
    let class = prop_oneof![
        8 => Just(Class::Tier(Tier::Capped)),
        1 => Just(Class::Oversubscribed),
        2 => Just(Class::Tier(Tier::Concurrent)),
        2 => Just(Class::Tier(Tier::Timeshared)),
        2 => Just(Class::Tier(Tier::Exclusive)),
        1 => Just(Class::Tier(Tier::Passthrough)),
        1 => Just(Class::Hard),
        2 => Just(Class::Any),
    ];
    let class = class.prop_flat_map(|class| (Just(class), any_sizes(class)));
    let product = prop::option::weighted(0.05, 0..PRODUCTS.len());
    let apart = prop::bool::weighted(0.15);
    (class, numbers, product, apart).prop_map(
        |((class, (memory, cores)), number, product, apart)| Ask {
            class,
            number,
            memory,
            cores,
            product,
            apart,
        },
    )
}

fn any_request(gpus: usize) -> impl Strategy<Value = Request> {
    let number = move || {
        prop_oneof![
            9 => Just(Number::Exactly(1)),
            1 => (1..=gpus.min(4) + 1).prop_map(Number::Exactly),
        ]
    };
    prop_oneof![
        4 => any_ask(number()).prop_map(Request::Exactly),
        1 => prop::collection::vec(any_ask(number()), 1..=3).prop_map(Request::FirstAvailable),
    ]
}

fn any_claim(gpus: usize) -> impl Strategy<Value = Claim> {
    let plain = |requests| Claim {
        requests,
        uuids: None,
    };
    let constrained = (
        prop::collection::vec(any_request(gpus), 2),
        prop::sample::select(vec![None, Some(Uuids::Distinct), Some(Uuids::Same)]),
    );
    prop_oneof![
        12 => any_request(gpus).prop_map(move |request| plain(vec![request])),
        2 => constrained.prop_map(|(requests, uuids)| Claim { requests, uuids }),
        1 => any_ask(Just(Number::All)).prop_map(move |ask| plain(vec![Request::Exactly(ask)])),
    ]
}

/// The claims of a pod on a node with so many GPUs.
pub fn any_pod(gpus: usize) -> impl Strategy<Value = Vec<Claim>> {
    prop_oneof![
        9 => any_claim(gpus).prop_map(|claim| vec![claim]),
        1 => prop::collection::vec(any_claim(gpus), 2),
    ]
}
