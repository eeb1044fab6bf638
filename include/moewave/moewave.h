// Everything a user of the library includes.
#pragma once

#include "moewave/bf16.h"
#include "moewave/config.h"
#include "moewave/error.h"
#include "moewave/host_layer.h"
#include "moewave/version.h"
