//! What claims ask for, in one form for requests and their alternatives.

use std::collections::BTreeMap;

use k8s_openapi::api::resource::v1::{
    CapacityRequirements, DeviceClass, DeviceRequest, DeviceSelector, DeviceToleration,
    ResourceClaim,
};

use super::capacity::{self, Amounts};
use super::constraint::Constraint;
use super::problem::Problem;

/// A claim that is to be allocated.
#[derive(Debug)]
pub(super) struct Claim<'a> {
    /// `namespace/name`.
    pub name: String,
    pub requests: Vec<Request<'a>>,
    pub constraints: Vec<Constraint<'a>>,
}

#[derive(Debug)]
pub(super) struct Request<'a> {
    /// The one of `exactly`, or those of `firstAvailable`, in their order.
    pub asks: Vec<Ask<'a>>,
    pub is_choice: bool,
}

/// Devices of one kind.
#[derive(Debug)]
pub(super) struct Ask<'a> {
    pub request: &'a str,
    /// The alternative's name in `firstAvailable`.
    pub alternative: Option<&'a str>,
    pub class: &'a DeviceClass,
    pub selectors: &'a [DeviceSelector],
    pub number: Number,
    pub admin: bool,
    pub tolerations: &'a [DeviceToleration],
    pub capacity: Amounts<'a>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Number {
    Exactly(usize),
    All,
}

impl Ask<'_> {
    /// As in an allocation result: `request` or `request/alternative`.
    pub fn full_name(&self) -> String {
        match self.alternative {
            Some(alternative) => format!("{}/{alternative}", self.request),
            None => self.request.to_owned(),
        }
    }
}

/// `namespace/name`.
pub(super) fn name(claim: &ResourceClaim) -> String {
    let namespace = claim.metadata.namespace.as_deref().unwrap_or_default();
    let name = claim.metadata.name.as_deref().unwrap_or_default();
    format!("{namespace}/{name}")
}

/// The fields that `exactly` and an alternative have in common.
struct Fields<'a> {
    alternative: Option<&'a str>,
    class: &'a str,
    selectors: Option<&'a Vec<DeviceSelector>>,
    mode: Option<&'a str>,
    count: Option<i64>,
    admin: bool,
    tolerations: Option<&'a Vec<DeviceToleration>>,
    capacity: Option<&'a CapacityRequirements>,
    derives: bool,
}

pub(super) fn read<'a>(
    claim: &'a ResourceClaim,
    classes: &BTreeMap<&str, &'a DeviceClass>,
) -> Result<Claim<'a>, Problem> {
    let name = self::name(claim);
    let devices = claim.spec.as_ref().and_then(|spec| spec.devices.as_ref());
    let mut requests = Vec::new();
    for request in devices.iter().flat_map(|it| it.requests.iter().flatten()) {
        let fields = self::fields(request);
        if fields.is_empty() {
            let message = format!(
                "claim {name}, request {}: unknown request type",
                request.name
            );
            return Err(Problem::Stops(message));
        }
        let asks = fields
            .iter()
            .map(|it| self::ask(&name, &request.name, it, classes));
        requests.push(Request {
            asks: asks.collect::<Result<_, _>>()?,
            is_choice: request.exactly.is_none(),
        });
    }
    let mut constraints = Vec::new();
    for constraint in devices
        .iter()
        .flat_map(|it| it.constraints.iter().flatten())
    {
        let constraint = Constraint::read(constraint);
        constraints.push(
            constraint.ok_or_else(|| {
                Problem::stops(format!("claim {name}: unsupported constraint type"))
            })?,
        );
    }
    Ok(Claim {
        name,
        requests,
        constraints,
    })
}

fn fields(request: &DeviceRequest) -> Vec<Fields<'_>> {
    if let Some(it) = &request.exactly {
        return vec![Fields {
            alternative: None,
            class: &it.device_class_name,
            selectors: it.selectors.as_ref(),
            mode: it.allocation_mode.as_deref(),
            count: it.count,
            admin: it.admin_access == Some(true),
            tolerations: it.tolerations.as_ref(),
            capacity: it.capacity.as_ref(),
            derives: it
                .derived_attributes
                .as_ref()
                .is_some_and(|it| !it.is_empty()),
        }];
    }
    let alternatives = request.first_available.iter().flatten();
    let fields = alternatives.map(|it| Fields {
        alternative: Some(&it.name),
        class: &it.device_class_name,
        selectors: it.selectors.as_ref(),
        mode: it.allocation_mode.as_deref(),
        count: it.count,
        admin: false,
        tolerations: it.tolerations.as_ref(),
        capacity: it.capacity.as_ref(),
        derives: it
            .derived_attributes
            .as_ref()
            .is_some_and(|it| !it.is_empty()),
    });
    fields.collect()
}

fn ask<'a>(
    claim: &str,
    request: &'a str,
    fields: &Fields<'a>,
    classes: &BTreeMap<&str, &'a DeviceClass>,
) -> Result<Ask<'a>, Problem> {
    let place = match fields.alternative {
        Some(alternative) => format!("claim {claim}, request {request}/{alternative}"),
        None => format!("claim {claim}, request {request}"),
    };
    let class = classes.get(fields.class).copied().ok_or_else(|| {
        let class = fields.class;
        Problem::stops(format!("{place}: device class {class} does not exist"))
    })?;
    if fields.derives {
        let message = format!("{place}: cannot handle request with derived attributes");
        return Err(Problem::Stops(message));
    }
    let mut capacity = Amounts::new();
    for (name, amount) in fields
        .capacity
        .iter()
        .flat_map(|it| it.requests.iter().flatten())
    {
        capacity.insert(name, capacity::parse(amount)?);
    }
    let number = match fields.mode {
        Some("All") => Number::All,
        None | Some("" | "ExactCount") => {
            let count = fields.count.filter(|count| *count != 0).unwrap_or(1);
            let number = usize::try_from(count)
                .map_err(|_| Problem::stops(format!("{place}: the count")))?;
            Number::Exactly(number)
        }
        Some(mode) => {
            let message = format!("{place}: unsupported count mode {mode}");
            return Err(Problem::Stops(message));
        }
    };
    Ok(Ask {
        request,
        alternative: fields.alternative,
        class,
        selectors: fields.selectors.map(Vec::as_slice).unwrap_or_default(),
        number,
        admin: fields.admin,
        tolerations: fields.tolerations.map(Vec::as_slice).unwrap_or_default(),
        capacity,
    })
}
