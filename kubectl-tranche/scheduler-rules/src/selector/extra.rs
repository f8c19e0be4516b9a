//! The types that Kubernetes adds to CEL's.

use std::any::Any;
use std::cmp::Ordering;

use cel::common::types::Type;
use cel::common::value::{StaticVal, Val};
use semver::Version;
use tranche_api::Quantity;

static QUANTITY: Type = Type::new_unspecified_type("kubernetes.Quantity");
static SEMVER: Type = Type::new_unspecified_type("kubernetes.Semver");

/// A type whose functions compare values: CEL's `<` does not know it.
pub(super) trait Ordered {
    fn order(&self, other: &Self) -> Ordering;
}

#[derive(Clone, Debug)]
pub(super) struct Amount(pub Quantity);

#[derive(Clone, Debug)]
pub(super) struct Semver(pub Version);

impl Ordered for Amount {
    fn order(&self, other: &Self) -> Ordering {
        self.0.cmp(&other.0)
    }
}

impl Ordered for Semver {
    fn order(&self, other: &Self) -> Ordering {
        self.0.cmp_precedence(&other.0)
    }
}

macro_rules! value_of_cel {
    ($type:ty, $name:ident) => {
        impl Val for $type {
            fn get_type(&self) -> &Type {
                &$name
            }

            fn cel_type() -> &'static Type {
                &$name
            }

            fn equals(&self, other: &dyn Val) -> bool {
                other
                    .downcast_ref::<Self>()
                    .is_some_and(|other| self.order(other).is_eq())
            }

            fn clone_as_boxed<'v>(&self) -> Box<dyn Val + 'v> {
                Box::new(self.clone())
            }

            fn as_any(&self) -> Option<&dyn Any> {
                Some(self)
            }
        }

        impl StaticVal for $type {}
    };
}

value_of_cel!(Amount, QUANTITY);
value_of_cel!(Semver, SEMVER);
