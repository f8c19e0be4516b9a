//! Claims of pods, generated.

use proptest::prelude::*;
use serde_json::{Value, json};

/// The claims of a pod.
#[derive(Clone, Debug)]
pub struct Pod(pub Vec<Claim>);

#[derive(Clone, Debug)]
pub struct Claim {
    /// The alternatives of each request.
    pub requests: Vec<Vec<Ask>>,
    /// The kind, the attribute, and whether it is for all requests.
    pub constraints: Vec<(&'static str, &'static str, bool)>,
}

#[derive(Clone, Debug)]
pub struct Ask {
    pub class: &'static str,
    pub selectors: Vec<&'static str>,
    /// 0 for all.
    pub count: u32,
    pub memory: Option<&'static str>,
    pub cores: Option<&'static str>,
    pub toleration: Option<Value>,
    pub admin: bool,
}

/// Selectors of every form that users write, some of which fail on some devices.
const SELECTORS: [&str; 36] = [
    "device.attributes['a.example.com'].kind == 'x'",
    "device.attributes['a.example.com'].kind != 'x'",
    "has(device.attributes['a.example.com'].kind) && device.attributes['a.example.com'].kind == 'y'",
    "device.attributes['a.example.com'].?kind.orValue('x') == 'x'",
    "device.attributes['a.example.com'][?'kind'].hasValue()",
    "device.attributes['nobody.example.com'].?kind.orValue('none') == 'none'",
    "has(device.attributes['nobody.example.com'].kind)",
    "'a.example.com' in device.attributes",
    "'nobody.example.com' in device.attributes",
    "'kind' in device.attributes['a.example.com']",
    "device.attributes['a.example.com'].?index.orValue(0) > 0",
    "device.attributes['a.example.com'].?index.orValue(0) * 2 - 1 in [1, 3]",
    "device.attributes['a.example.com'].?index.orValue(0) + 1 >= 2 || device.driver.startsWith('b.')",
    "device.attributes['a.example.com'].fast",
    "!device.attributes['a.example.com'].?fast.orValue(false)",
    "device.attributes['a.example.com'].fast || true",
    "device.attributes['a.example.com'].fast && false",
    "device.capacity['a.example.com'].memory.compareTo(quantity('4')) >= 0",
    "device.capacity['a.example.com'].?memory.orValue(quantity('0')).isGreaterThan(quantity('3'))",
    "device.capacity['a.example.com'].?memory.orValue(quantity('1k')).isLessThan(quantity('5000m'))",
    "device.capacity['a.example.com'].?memory.orValue(quantity('1')).add(quantity('1')).sub(2).asInteger() > 2",
    "device.capacity['a.example.com'].?memory.orValue(quantity('2')) == quantity('2')",
    "quantity('1500m').isInteger() || isQuantity('3Gi') && !isQuantity('3gi')",
    "device.attributes['a.example.com'].?version.orValue(semver('0.0.1')).compareTo(semver('1.10.0')) >= 0",
    "device.attributes['a.example.com'].version.isLessThan(semver('v2', true))",
    "device.attributes['a.example.com'].?version.orValue(semver('9.0.0')).major() == 1",
    "isSemver('v1.0') || semver('01.02', true).minor() == 2",
    "device.attributes['other.example.com'].root.matches('^r[01]$')",
    "device.attributes['other.example.com'].?root.orValue('').size() == 2",
    "device.attributes['other.example.com'].?root.orValue('Z').lowerAscii().contains('1')",
    "cel.bind(own, device.attributes['a.example.com'], has(own.kind) ? own.kind == 'x' : own.?fast.orValue(true))",
    "['x', 'z'].exists(kind, kind == device.attributes['a.example.com'].kind)",
    "[0, 1].all(number, number < device.attributes['a.example.com'].?index.orValue(5))",
    "sets.contains(['x', 'y'], [device.attributes['a.example.com'].?kind.orValue('q')])",
    "device.attributes['a.example.com'].?index.optMap(index, index > 0).orValue(false)",
    "[1, 2, 3].filter(number, number > 1).map(number, number * 2).sum() == 10 || device.attributes['a.example.com'].size() > 2",
];

/// Amounts of capacities.
const AMOUNTS: [&str; 10] = ["0", "1", "2", "3", "4", "5", "7", "1500m", "250m", "12"];

impl Pod {
    /// The claims of the story's pod with this number.
    pub fn claims(&self, number: usize) -> Vec<Value> {
        let claims = self.0.iter().enumerate();
        claims
            .map(|(index, claim)| claim.object(&format!("claim-{number}-{index}")))
            .collect()
    }
}

impl Claim {
    fn object(&self, name: &str) -> Value {
        let requests = self.requests.iter().enumerate().map(|(number, asks)| {
            let name = format!("request-{number}");
            match &asks[..] {
                [ask] => json!({"name": name, "exactly": ask.fields(true)}),
                asks => {
                    let asks = asks.iter().enumerate().map(|(number, ask)| {
                        let mut fields = ask.fields(false);
                        fields["name"] = json!(format!("choice-{number}"));
                        fields
                    });
                    json!({"name": name, "firstAvailable": asks.collect::<Vec<_>>()})
                }
            }
        });
        let constraints = self.constraints.iter().map(|(kind, attribute, all)| {
            let mut constraint = json!({*kind: attribute});
            if !all {
                constraint["requests"] = json!(["request-0"]);
            }
            constraint
        });
        json!({
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaim",
            "metadata": {"namespace": "team-a", "name": name, "uid": format!("uid-of-{name}")},
            "spec": {"devices": {
                "requests": requests.collect::<Vec<_>>(),
                "constraints": constraints.collect::<Vec<_>>(),
            }},
        })
    }
}

impl Ask {
    fn fields(&self, alone: bool) -> Value {
        let mut fields = json!({"deviceClassName": self.class});
        match self.count {
            0 => fields["allocationMode"] = json!("All"),
            1 => {}
            count => fields["count"] = json!(count),
        }
        if !self.selectors.is_empty() {
            let selectors = self
                .selectors
                .iter()
                .map(|it| json!({"cel": {"expression": it}}));
            fields["selectors"] = json!(selectors.collect::<Vec<_>>());
        }
        let mut amounts = serde_json::Map::new();
        for (name, amount) in [("memory", self.memory), ("cores", self.cores)] {
            amount.map(|amount| amounts.insert(name.to_owned(), json!(amount)));
        }
        if !amounts.is_empty() {
            fields["capacity"] = json!({"requests": amounts});
        }
        if let Some(toleration) = &self.toleration {
            fields["tolerations"] = json!([toleration]);
        }
        if self.admin && alone {
            fields["adminAccess"] = json!(true);
        }
        fields
    }
}

fn any_ask() -> impl Strategy<Value = Ask> {
    let selectors = prop_oneof![
        6 => Just(Vec::new()),
        3 => prop::sample::select(SELECTORS.to_vec()).prop_map(|selector| vec![selector]),
        1 => prop::collection::vec(prop::sample::select(SELECTORS.to_vec()), 2),
    ];
    let amount = |weight| prop::option::weighted(weight, prop::sample::select(AMOUNTS.to_vec()));
    let tolerations = vec![
        json!({"operator": "Exists"}),
        json!({"key": "bad", "operator": "Exists", "effect": "NoSchedule"}),
        json!({"key": "bad", "operator": "Equal", "value": "yes"}),
        json!({"key": "bad", "operator": "Equal", "value": "no"}),
        json!({"key": "other", "operator": "Exists"}),
    ];
    (
        prop::sample::select(vec!["any", "any", "a", "shared", "whole"]),
        selectors,
        prop_oneof![30 => Just(1_u32), 8 => 2..=3_u32, 3 => Just(0), 1 => Just(40)],
        amount(0.4),
        amount(0.2),
        prop::option::weighted(0.2, prop::sample::select(tolerations)),
        prop::bool::weighted(0.05),
    )
        .prop_map(
            |(class, selectors, count, memory, cores, toleration, admin)| Ask {
                class,
                selectors,
                count,
                memory,
                cores,
                toleration,
                admin,
            },
        )
}

fn any_claim() -> impl Strategy<Value = Claim> {
    let request = prop_oneof![
        4 => prop::collection::vec(any_ask(), 1),
        1 => prop::collection::vec(any_ask(), 2..=3),
    ];
    let constraint = (
        prop::sample::select(vec!["matchAttribute", "distinctAttribute"]),
        prop::sample::select(vec![
            "a.example.com/index",
            "a.example.com/kind",
            "a.example.com/fast",
            "a.example.com/version",
            "other.example.com/root",
        ]),
        any::<bool>(),
    );
    (
        prop_oneof![
            4 => prop::collection::vec(request.clone(), 1),
            2 => prop::collection::vec(request.clone(), 2),
            1 => prop::collection::vec(request, 3),
        ],
        prop_oneof![
            3 => Just(Vec::new()),
            1 => prop::collection::vec(constraint, 1..=2),
        ],
    )
        .prop_map(|(requests, constraints)| Claim {
            requests,
            constraints,
        })
}

/// The claims of a pod.
pub fn any_pod() -> impl Strategy<Value = Pod> {
    prop_oneof![
        5 => prop::collection::vec(any_claim(), 1),
        1 => prop::collection::vec(any_claim(), 2),
    ]
    .prop_map(Pod)
}
