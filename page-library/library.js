import * as echarts from "echarts/core";
import { BarChart, LineChart, CustomChart } from "echarts/charts";
import { GridComponent, TooltipComponent, DataZoomInsideComponent, DataZoomSliderComponent, LegendComponent, MarkLineComponent } from "echarts/components";
import { CanvasRenderer } from "echarts/renderers";
import { h, render, Fragment } from "preact";
import { useState, useMemo, useEffect, useRef, useCallback } from "preact/hooks";
echarts.use([BarChart, LineChart, CustomChart, GridComponent, TooltipComponent, DataZoomInsideComponent, DataZoomSliderComponent, LegendComponent, MarkLineComponent, CanvasRenderer]);
export { echarts, h, render, Fragment, useState, useMemo, useEffect, useRef, useCallback };
